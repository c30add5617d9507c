// Linears of bfloat16 weights by AMX, the matrix unit of Intel's server processors since Sapphire Rapids. It multiplies
// bfloat16 and adds in float32, ten times as fast as their vector units, so that a product with few rows
// costs as much as reading its weights.
//
// In float32 nothing is rounded to bfloat16: an activation is the sum of three bfloat16 numbers, of eight bits each, and so
// is its product with a weight. In bfloat16 an activation is one such number, the nearest. Every output is one chain
// of sums, kMatrixInputs inputs after the others, and of these the smallest parts first, so that it depends on neither the
// other rows nor the thread.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cache_lines.h"
#include "target.h"
#include "tiles.h"
#include "work.h"

MULTILORA_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")

namespace multilora {
namespace {

// Steps from the request for a tile of weights to the step that uses it. Earlier requests gain nothing.
constexpr int64_t kFetchSteps = 1;

// Bytes of all parts of an activation.
template <int Parts>
constexpr int64_t kPartsSize = Parts * int64_t(sizeof(uint16_t));

// At most kMatrixRows rows, in tiles of one size: two may share a row, whose results are the same.
template <int Parts>
struct RowGroup {
  int64_t first, rows;

  bool is_single_tile() const { return rows <= kTileRows; }
  int64_t tile_rows() const { return is_single_tile() ? rows : (rows + 1) / 2; }
  int64_t second_tile() const { return rows - tile_rows(); }
  int64_t part_bytes() const { return rows * kRowBytes; }
  const char* x(const LinearTask& task) const {
    return static_cast<const char*>(task.x_parts) + first * task.in_features * kPartsSize<Parts>;
  }
};

// Weights of kMatrixInputs inputs for the outputs of a panel.
template <int Parts>
struct Step {
  const char* weights;
  int64_t next_outputs;  // bytes from the tile of some outputs to the tile of the next
  const char* x;         // the first part
  int64_t next_part, next_rows;

  const char* tile(int vector) const { return weights + vector * next_outputs; }

  // Adds the products with one or two tiles of rows, and calls between(0 .. kPanelVectors - 1) meanwhile. Sums take turns, so
  // that none waits for its own last addition.
  template <int RowTiles, class Between>
  inline void add(const Between& between) const {
    static_assert(kPanelVectors == 3 && (RowTiles == 1 || RowTiles == 2));
    if constexpr (RowTiles == 1) {
      Tiles::load<3>(tile(0));
      Tiles::load<4>(tile(1));
      Tiles::load<5>(tile(2));
    }
    for (int part = Parts - 1; part >= 0; --part) {
      Tiles::load<Tiles::kX>(x + part * next_part);
      if constexpr (RowTiles == 1) {
        Tiles::multiply_pairs<0, 3>();
        Tiles::multiply_pairs<1, 4>();
        Tiles::multiply_pairs<2, 5>();
      } else {
        multiply<0, 0>();
        multiply<1, 1>();
        multiply<2, 2>();
        Tiles::load<Tiles::kX>(x + part * next_part + next_rows);
        Tiles::multiply_pairs<5, Tiles::kWeights>();
        multiply<4, 1>();
        multiply<3, 0>();
      }
      for (int vector = Parts - 1 - part; vector < kPanelVectors; vector += Parts) {
        between(vector);
      }
    }
  }

 private:
  template <int Sums, int Vector>
  inline void multiply() const {
    Tiles::load<Tiles::kWeights>(tile(Vector));
    Tiles::multiply_pairs<Sums, Tiles::kWeights>();
  }
};

// One panel of the weights, and its outputs.
template <int Parts>
class Panel {
 public:
  Panel(const LinearTask& task, int64_t panel)
      : task_(task), steps_(task.in_features / kMatrixInputs), next_outputs_(steps_ * kTileBytes),
        weights_(static_cast<const char*>(task.panels) + panel * kPanelVectors * next_outputs_),
        y_(task.y + panel * kPanelOutputs), outputs_(std::min(kPanelOutputs, task.out_features - panel * kPanelOutputs)) {}

  // N: tiles of the group; fetches: the lines that come next from memory.
  template <int N>
  void multiply(const RowGroup<Parts>& group, bool fetches) const {
    Sums<N>::zero();
    Step<Parts> step{weights_, next_outputs_, group.x(task_), group.part_bytes(), group.second_tile() * kRowBytes};
    for (int64_t s = 0; s < steps_; ++s, step.weights += kTileBytes, step.x += Parts * step.next_part) {
      if (fetches) {
        step.template add<N>([ahead = ahead(s), this](int vector) { fetch_tile(ahead + vector * next_outputs_); });
      } else {
        step.template add<N>([](int) {});
      }
    }
    float* y = y_ + group.first * task_.y_stride;
    if (outputs_ == kPanelOutputs) {
      Sums<N>::store(y, task_.y_stride, group.second_tile());
    } else {
      alignas(kRowBytes) float sums[kMatrixRows * kPanelOutputs];
      Sums<N>::store(sums, kPanelOutputs, group.second_tile());
      for (int64_t r = 0; r < group.rows; ++r) {
        std::copy_n(sums + r * kPanelOutputs, outputs_, y + r * task_.y_stride);
      }
    }
  }

 private:
  // The weights of the first outputs some steps later, perhaps of the next panel.
  const char* ahead(int64_t step) const {
    const int64_t later = step + kFetchSteps;
    return weights_ + (later < steps_ ? later : later + (kPanelVectors - 1) * steps_) * kTileBytes;
  }

  static void fetch_tile(const char* tile) {
    for (int64_t line = 0; line < kTileBytes; line += kRowBytes) {
      fetch_line(tile + line);
    }
  }

  const LinearTask& task_;
  const int64_t steps_, next_outputs_;
  const char* const weights_;
  float* const y_;
  const int64_t outputs_;
};

// Multiplies groups of `rows` rows each.
template <int Parts>
void multiply_groups(const LinearTask& task, int64_t first, int64_t end, int64_t rows, int64_t panel_begin, int64_t panel_end) {
  if (first == end) {
    return;
  }
  const RowGroup<Parts> first_group{first, rows};
  const Tiles owner(first_group.is_single_tile(), first_group.tile_rows());
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    const Panel<Parts> panel(task, p);
    for (int64_t row = first; row < end; row += rows) {
      const RowGroup<Parts> group{row, rows};
      if (group.is_single_tile()) {
        panel.template multiply<1>(group, row == 0);
      } else {
        panel.template multiply<2>(group, row == 0);
      }
    }
  }
}

template <int Parts>
void linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  const int64_t left = task.rows % kMatrixRows;
  multiply_groups<Parts>(task, 0, task.rows - left, kMatrixRows, panel_begin, panel_end);
  multiply_groups<Parts>(task, task.rows - left, task.rows, left, panel_begin, panel_end);
}

inline __m512 widened(__m256i bfloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
}

template <int Parts>
void split(const SplitTask& task, int64_t unit_begin, int64_t unit_end) {
  const int64_t steps = task.in_features / kMatrixInputs;
  for (int64_t unit = unit_begin; unit < unit_end; ++unit) {
    const int64_t first = unit / steps * kMatrixRows, step = unit % steps, rows = std::min(kMatrixRows, task.rows - first);
    const float* x = task.x + first * task.x_stride + step * kMatrixInputs;
    char* to = static_cast<char*>(task.parts) + first * task.in_features * kPartsSize<Parts> + step * Parts * rows * kRowBytes;
    for (int64_t r = 0; r < rows; ++r, x += task.x_stride, to += kRowBytes) {
      __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + kTileOutputs);
      for (int part = 0; part < Parts; ++part) {
        const __m512i nearest = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_store_si512(to + part * rows * kRowBytes, nearest);
        low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(nearest)));
        high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(nearest, 1)));
      }
    }
  }
}

// Whether a processor with AVX-512 has the unit and the system lets this process use it. The process asks the system once,
// because threads with tiles have more state to save.
bool is_available() {
  constexpr unsigned kFeatures = 7, kTiles = 1 << 24, kTileProducts = 1 << 22, kVectorConversions = 1 << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) || !(d & kTiles) || !(d & kTileProducts) ||
      !__get_cpuid_count(kFeatures, 1, &a, &b, &c, &d) || !(a & kVectorConversions)) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

template <int Parts>
constexpr PairUnit kUnit = {kMatrixInputs, kPartsSize<Parts>, split<Parts>, linear<Parts>};

}  // namespace

bool has_amx_byte_products() {
  constexpr unsigned kFeatures = 7, kByteProducts = 1 << 25, kByteShuffles = 1 << 1;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) && (d & kByteProducts) && (c & kByteShuffles);
}

const PairUnits kAmx = {"amx", is_available, &kUnit<3>, &kUnit<1>, nullptr};

}  // namespace multilora

MULTILORA_TARGET_END

#endif
