// A wall clock that can be set while the program runs, for LD_PRELOAD: it is off by as many nanoseconds as the first
// eight bytes of the file WALL_CLOCK_OFFSET say at the moment. The monotonic clock, and the times of files, stay true.
//
// As in the kernel, waiting until a moment of the wall clock ends at once when the clock is set past it, and takes
// longer when it is set back: a wait looks again every few milliseconds. Not so with libfaketime 0.9.10, which decides
// at its begin how long a wait takes, leaves pthread_mutex_timedlock and futexes to wait for the hour that it makes up,
// and with a true monotonic clock fails Python's time.sleep (EINVAL).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS INT64_C(1000000000)
#define LOOK_NS (10 * SECOND_NS / 1000)

// The next definition of a function after this library's own: the C library's.
#define REAL(name)                                                                     \
  ({                                                                                   \
    static _Atomic(__typeof__(&name)) found;                                           \
    __typeof__(&name) real = atomic_load(&found);                                      \
    if (!real) atomic_store(&found, real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)); \
    real;                                                                              \
  })

static _Atomic int64_t no_offset;
static _Atomic int64_t *offset_ns = &no_offset;

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("WALL_CLOCK_OFFSET");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *page = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) abort();
  offset_ns = page;
  close(fd);
}

static int64_t to_ns(const struct timespec *at) { return at->tv_sec * SECOND_NS + at->tv_nsec; }

static struct timespec from_ns(int64_t ns) { return (struct timespec){ns / SECOND_NS, ns % SECOND_NS}; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = REAL(clock_gettime)(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    *now = from_ns(to_ns(now) + atomic_load(offset_ns));
  return failed;
}

static int64_t now_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return to_ns(&now);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  int64_t ns = now_ns(CLOCK_REALTIME);
  *now = (struct timeval){ns / SECOND_NS, ns % SECOND_NS / 1000};
  return 0;
}

time_t time(time_t *now) {
  time_t seconds = now_ns(CLOCK_REALTIME) / SECOND_NS;
  if (now) *now = seconds;
  return seconds;
}

// Whether it is not yet `deadline` by the wall clock. look_at: when to look again, by the monotonic clock; a moment long
// past if there is nothing to wait for.
static bool has_time_left(const struct timespec *deadline, struct timespec *look_at) {
  int64_t left_ns = to_ns(deadline) - now_ns(CLOCK_REALTIME);
  *look_at = from_ns(left_ns > 0 ? now_ns(CLOCK_MONOTONIC) + (left_ns < LOOK_NS ? left_ns : LOOK_NS) : 0);
  return left_ns > 0;
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline) {
  if (clock != CLOCK_REALTIME) return REAL(sem_clockwait)(semaphore, clock, deadline);
  struct timespec look_at;
  bool is_early;
  int failed;
  do {
    is_early = has_time_left(deadline, &look_at);
    failed = REAL(sem_clockwait)(semaphore, CLOCK_MONOTONIC, &look_at);
  } while (failed && errno == ETIMEDOUT && is_early);
  return failed;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  return sem_clockwait(semaphore, CLOCK_REALTIME, deadline);
}

int pthread_mutex_clocklock(pthread_mutex_t *restrict mutex, clockid_t clock, const struct timespec *restrict deadline) {
  if (clock != CLOCK_REALTIME) return REAL(pthread_mutex_clocklock)(mutex, clock, deadline);
  struct timespec look_at;
  bool is_early;
  int error;
  do {
    is_early = has_time_left(deadline, &look_at);
    error = REAL(pthread_mutex_clocklock)(mutex, CLOCK_MONOTONIC, &look_at);
  } while (error == ETIMEDOUT && is_early);
  return error;
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
  return pthread_mutex_clocklock(mutex, CLOCK_REALTIME, deadline);
}

// Looking again is a spurious wakeup, which every caller expects: waiting on here could miss a signal.
int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict deadline) {
  if (clock != CLOCK_REALTIME) return REAL(pthread_cond_clockwait)(condition, mutex, clock, deadline);
  struct timespec look_at;
  bool is_early = has_time_left(deadline, &look_at);
  int error = REAL(pthread_cond_clockwait)(condition, mutex, CLOCK_MONOTONIC, &look_at);
  return error == ETIMEDOUT && is_early ? 0 : error;
}

// Only the condition knows its clock, but the monotonic one counts from boot: nothing there is after 2001.
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  clockid_t clock = deadline->tv_sec < 1000000000 ? CLOCK_MONOTONIC : CLOCK_REALTIME;
  return pthread_cond_clockwait(condition, mutex, clock, deadline);
}

// The system call in which libstdc++ and gRPC wait by themselves.
long syscall(long number, ...) {
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) arguments[i] = va_arg(list, long);
  va_end(list);
  const struct timespec *deadline = (const struct timespec *)arguments[3];
  int operation = arguments[1];
  bool is_wait = number == SYS_futex && (operation & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
  bool is_by_wall_clock = is_wait && operation & FUTEX_CLOCK_REALTIME && deadline;
  struct timespec look_at;
  bool is_early = false;
  long result;
  do {
    if (is_by_wall_clock) {
      is_early = has_time_left(deadline, &look_at);
      arguments[1] = operation & ~FUTEX_CLOCK_REALTIME;
      arguments[3] = (long)&look_at;
    }
    result = REAL(syscall)(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
  } while (result == -1 && errno == ETIMEDOUT && is_early);
  return result;
}
