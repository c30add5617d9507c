// The tiles of AMX, Intel's matrix unit, and the sums of a panel's products with one or two tiles of rows.
//
// In assembly, because files that have other code, too, are compiled for processors without the unit.
//
// Source of the instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include <cstdint>
#include <type_traits>

#include "work.h"

namespace multilora {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kRowBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kRowBytes;
// Outputs of a column of a panel, and of all its columns.
constexpr int64_t kTileOutputs = 16;
constexpr int64_t kPanelOutputs = kPanelVectors * kTileOutputs;

struct alignas(kRowBytes) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The tiles of this thread: sums in 0 .. 5, of which a panel has 0 .. 2 with one tile of rows and 3 .. 5 with a second one; where
// there is a single one, 3 .. 5 may have weights.
class Tiles {
 public:
  static constexpr int kX = 6, kWeights = 7;

  // rows: of each tile of rows. x_bytes: of a row of x, by which weights of a quarter as many rows are multiplied.
  Tiles(bool is_single, int64_t rows, int64_t x_bytes = kRowBytes) {
    TileConfiguration configuration;
    for (int tile = 0; tile < 8; ++tile) {
      const bool has_weights = tile == kWeights || (is_single && tile >= kPanelVectors && tile < kX);
      configuration.row_bytes[tile] = static_cast<uint16_t>(tile == kX ? x_bytes : kRowBytes);
      configuration.rows[tile] = static_cast<uint8_t>(has_weights ? x_bytes / 4 : rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(configuration));
  }
  // Otherwise the system would save the tiles at each change of threads.
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int Tile>
  static inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  template <int Tile>
  static inline void load(const void* from, int64_t stride = kRowBytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  static inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  // sums += x * weights, of pairs of bfloat16 or of four bytes.
  template <int Sums, int Weights>
  static inline void multiply_pairs() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(Weights), "i"(kX), "i"(Sums));
  }
  template <int Sums, int Weights>
  static inline void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(Weights), "i"(kX), "i"(Sums));
  }
};

// The sums of one or two tiles of rows.
template <int N>
struct Sums {
  static inline void zero() {
    for_each([](auto tile) { Tiles::zero<tile()>(); });
  }
  // Stores the sums to rows of a panel's outputs, of 32 bits; stride: outputs from row to row; second: the first row of the
  // second tile.
  static inline void store(void* y, int64_t stride, int64_t second) {
    for_each([&](auto tile) {
      const int64_t row = tile() < kPanelVectors ? 0 : second;
      Tiles::store<tile()>(static_cast<int32_t*>(y) + row * stride + tile() % kPanelVectors * kTileOutputs, stride * 4);
    });
  }

 private:
  template <class Visit>
  static inline void for_each(const Visit& visit) {
    visit(std::integral_constant<int, 0>{});
    visit(std::integral_constant<int, 1>{});
    visit(std::integral_constant<int, 2>{});
    if constexpr (N == 2) {
      visit(std::integral_constant<int, 3>{});
      visit(std::integral_constant<int, 4>{});
      visit(std::integral_constant<int, 5>{});
    }
  }
};

}  // namespace
}  // namespace multilora
