/* Loaded into tritonserver before its own library: refuses what would end it or stop a model's process.

   Version 24.10 divides by zero where an output of strings is asked for as classes; it takes the memory that a shape
   asks for before it counts the values that came; and its Python backend makes an object of each string before our
   code sees any. The two functions stand in front of the library's of the same names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

enum { INVALID_ARG = 3, UNSUPPORTED = 5 };
enum { BYTES = 13 };

static const int64_t MAX_STRINGS = 1 << 16;
static const int64_t MAX_VALUES = 1 << 29; /* 1 GiB of FP16 */

typedef struct error error;
typedef error* (*add_input)(void*, const char*, int, const int64_t*, uint64_t);

/* Weak: the processes that tritonserver starts load this file, too, and have no such function. */
extern error* TRITONSERVER_ErrorNew(int code, const char* message) __attribute__((weak));

error* TRITONSERVER_InferenceRequestAddInput(
    void* request, const char* name, int datatype, const int64_t* shape, uint64_t num_dims) {
  const int64_t most = datatype == BYTES ? MAX_STRINGS : MAX_VALUES;
  int64_t size = 1;
  for (uint64_t i = 0; i < num_dims; i++) {
    /* No product of two numbers up to MAX_VALUES overflows. */
    if (shape[i] > most || (shape[i] > 1 && (size *= shape[i]) > most)) {
      char message[256];
      snprintf(message, sizeof message, "[INVALID_ARG] %.128s has more than %lld %s", name, (long long)most,
               datatype == BYTES ? "strings" : "values");
      return TRITONSERVER_ErrorNew(INVALID_ARG, message);
    }
  }
  return ((add_input)dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestAddInput"))(
      request, name, datatype, shape, num_dims);
}

/* The server asks for these only where a client wants an output as classes. */
error* TRITONSERVER_ServerModelBatchProperties(
    void* server, const char* model, int64_t version, uint32_t* flags, void** pointer) {
  return TRITONSERVER_ErrorNew(UNSUPPORTED, "[UNSUPPORTED] outputs are not classified here; leave class_count out");
}
