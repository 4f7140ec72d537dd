// How weights are stored: 16 rows interleaved, streamed from front to back. Each format decodes to exact float32 values.
//
// A tile is 16 rows of a weight, all of its columns. Columns come in blocks of 32:
//
//   F32   [column][16 rows] float                                                         2048 bytes a block
//   BF16  [column pair][16 rows][2] bfloat16                                              1024
//   Q4    [4 groups of 8 columns][16 rows] nibbles, then 16 half scales, 16 half minima    320 = 20 bytes a row, as Q4_1
//   Q8    all blocks [8 groups of 4 columns][16 rows][4] int8, then all half scales        544 = 34 bytes a row, as Q8_0
//
// In a 32-bit lane of Q4, nibble s holds column 2 (s mod 4) + s / 4 of its group: a half-word then has two neighbouring
// columns four bits below each other, which is what a pair of bfloat16 needs, and bytes have what an 8-bit product needs.
#pragma once

#include "simd.h"

namespace hp {
namespace {

enum Format : int64_t { F32 = 0, BF16 = 1, Q4 = 2, Q8 = 3 };

constexpr int BLOCK = 32;

// One weight matrix as packed by part.py.
struct Matrix {
    const uint8_t* data;
    int64_t format;
    int64_t rows;
    int64_t columns;

    int64_t tiles() const { return (rows + TILE - 1) / TILE; }
    int64_t blocks() const { return columns / BLOCK; }
    int64_t tile_bytes() const {
        switch (format) {
            case F32: return columns * TILE * 4;
            case BF16: return columns * TILE * 2;
            case Q4: return blocks() * 320;
            default: return (blocks() * 544 + 63) / 64 * 64;
        }
    }
    const uint8_t* tile(int64_t index) const { return data + index * tile_bytes(); }
};

// Decoders. `codes(block, b, sub, f)` calls f(vector, column) for the 32 columns of block b and the rows of sub-vector
// `sub`; the value is scale * code + minimum where SCALED, else the code itself.
struct DecodeF32 {
    static constexpr int BYTES = 2048;  // of codes, a block
    static constexpr bool SCALED = false, HAS_MINIMUM = false;
    template <class F>
    static HP_INLINE void codes(const uint8_t* tile, int64_t b, int sub, F&& f) {
        const float* p = reinterpret_cast<const float*>(tile) + b * BLOCK * TILE + sub * LANES;
#pragma GCC unroll 32
        for (int k = 0; k < BLOCK; k++) f(vload(p + k * TILE), k);
    }
    static HP_INLINE V scale(const uint8_t*, int64_t, int64_t, int) { return vset(1.0f); }
    static HP_INLINE V minimum(const uint8_t*, int64_t, int64_t, int) { return vzero(); }
};

struct DecodeBF16 {
    static constexpr int BYTES = 1024;  // of codes, a block
    static constexpr bool SCALED = false, HAS_MINIMUM = false;
    template <class F>
    static HP_INLINE void codes(const uint8_t* tile, int64_t b, int sub, F&& f) {
        const uint8_t* p = tile + b * 1024 + sub * LANES * 4;
#pragma GCC unroll 16
        for (int k = 0; k < BLOCK; k += 2) {
            const I v = iload(p + k * 32);
            f(low_bf16(v), k);
            f(high_bf16(v), k + 1);
        }
    }
    static HP_INLINE V scale(const uint8_t*, int64_t, int64_t, int) { return vset(1.0f); }
    static HP_INLINE V minimum(const uint8_t*, int64_t, int64_t, int) { return vzero(); }
};

struct DecodeQ4 {
    static constexpr int BYTES = 320;  // of codes, a block
    static constexpr bool SCALED = true, HAS_MINIMUM = true;
    template <class F>
    static HP_INLINE void codes(const uint8_t* tile, int64_t b, int sub, F&& f) {
        const uint8_t* p = tile + b * 320 + sub * LANES * 4;
#pragma GCC unroll 4
        for (int group = 0; group < 4; group++) {
            const I v = iload(p + group * 64);
            f(nibble<0>(v), group * 8 + 0);
            f(nibble<4>(v), group * 8 + 1);
            f(nibble<1>(v), group * 8 + 2);
            f(nibble<5>(v), group * 8 + 3);
            f(nibble<2>(v), group * 8 + 4);
            f(nibble<6>(v), group * 8 + 5);
            f(nibble<3>(v), group * 8 + 6);
            f(nibble<7>(v), group * 8 + 7);
        }
    }
    static HP_INLINE V scale(const uint8_t* tile, int64_t b, int64_t, int sub) {
        return vhalf(reinterpret_cast<const uint16_t*>(tile + b * 320 + 256) + sub * LANES);
    }
    static HP_INLINE V minimum(const uint8_t* tile, int64_t b, int64_t, int sub) {
        return vhalf(reinterpret_cast<const uint16_t*>(tile + b * 320 + 288) + sub * LANES);
    }
};

struct DecodeQ8 {  // codes come times 2^24, scales times 2^-24
    static constexpr int BYTES = 512;  // of codes, a block
    static constexpr bool SCALED = true, HAS_MINIMUM = false;
    template <class F>
    static HP_INLINE void codes(const uint8_t* tile, int64_t b, int sub, F&& f) {
        const uint8_t* p = tile + b * 512 + sub * LANES * 4;
#pragma GCC unroll 8
        for (int group = 0; group < 8; group++) {
            const I v = iload(p + group * 64);
            f(top_byte<0>(v), group * 4 + 0);
            f(top_byte<1>(v), group * 4 + 1);
            f(top_byte<2>(v), group * 4 + 2);
            f(top_byte<3>(v), group * 4 + 3);
        }
    }
    static HP_INLINE V plain_scale(const uint8_t* tile, int64_t b, int64_t blocks, int sub) {
        return vhalf(reinterpret_cast<const uint16_t*>(tile + blocks * 512 + b * 32) + sub * LANES);
    }
    static HP_INLINE V scale(const uint8_t* tile, int64_t b, int64_t blocks, int sub) {
        return plain_scale(tile, b, blocks, sub) * vset(0x1p-24f);
    }
    static HP_INLINE V minimum(const uint8_t*, int64_t, int64_t, int) { return vzero(); }
};

// The scale of plain codes, whatever the decoder makes of them.
template <class D>
HP_INLINE V plain_scale(const uint8_t* tile, int64_t b, int64_t blocks, int sub) {
    if constexpr (D::HAS_MINIMUM) return D::scale(tile, b, blocks, sub);
    else return D::plain_scale(tile, b, blocks, sub);
}

// Calls f with the decoder of a format as a value, so that each kernel is compiled once a format.
template <class F>
HP_INLINE auto with_decoder(int64_t format, F&& f) {
    switch (format) {
        case F32: return f(DecodeF32{});
        case BF16: return f(DecodeBF16{});
        case Q4: return f(DecodeQ4{});
        default: return f(DecodeQ8{});
    }
}

}  // namespace
}  // namespace hp
