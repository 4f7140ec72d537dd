// Products of many rows on the matrix unit (AMX), at the accuracy of float32.
//
// The unit multiplies bfloat16 and adds in float32. A float32 has 24 significant bits, a bfloat16 8: an activation is the
// sum of three bfloat16 exactly. Codes of Q4 and Q8 and values of BF16 are one bfloat16 exactly, so three products give
// what float32 would give; the scale of a block of 32 columns is applied in float32 to the block's sum. A float32 weight is
// three terms too, of which the six largest products are kept (what is dropped is below 2^-24 of the largest).
// With `narrow`, activations and weights are rounded to one term each: lossy, and three to six times less work.
//
//   panel (first cache) : up to 4 tiles of 16 weight rows, a chunk of columns, as bfloat16 pairs; BF16 is multiplied where it lies
//   x, 16 rows at a time: [row tile][block][term][16 rows][32 columns] bfloat16, streamed from the second cache
//   sums                : [row][4 tiles][16] float32, one thread's own
#pragma once

#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(HP_AVX512) && defined(__linux__)
#define HP_AMX 1

#include <new>

#include <sys/syscall.h>
#include <unistd.h>

namespace hp {
namespace {

constexpr int TERMS = 3;        // of an activation
constexpr int UNIT = 512;       // bfloat16 values of a tile register: 16 rows of 32
constexpr int TOGETHER = 4;     // weight tiles that share a panel
constexpr int CHUNK = 2;        // blocks of columns in a panel: with four tiles and 32 rows of x it fits the first cache
constexpr int CHUNK_IN_PLACE = 4;  // of bfloat16 weights, which are multiplied where they lie
constexpr int LEAST_TILES = 8;  // of rows, which go through all weights before the next do: more pay for spreading the weights
constexpr int MOST_BLOCKS = 384;  // of 16 rows and 32 columns, as three terms, that stay in the second cache

constexpr int LEAST_ROWS = 5;   // fewer are quicker without the unit

// Asks the kernel once for the use of tile registers. False where it, or the processor, has none.
inline bool amx_allowed() {
    static const bool allowed = [] {
        constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }();
    return allowed;
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Registers 0-3 sums, 4 activations, both of `rows` rows; 5 activations of 16 rows, or weights; 6-7 weights.
inline void configure_tiles(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = static_cast<uint8_t>(i < 5 ? rows : 16);
    _tile_loadconfig(&shapes);
}

inline void release_tiles() { _tile_release(); }

// Rows of a tile register for so many rows of activations.
inline int rows_for(int64_t rows) { return rows <= 8 ? 8 : 16; }

HP_INLINE __m512 truncated(__m512 x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }

HP_INLINE void store_pair(uint16_t* to, __m512 even, __m512 odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_store_si512(to, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, _mm512_castps_si512(odd)));
}

HP_INLINE __m512 rounded(__m512 x) {  // to bfloat16, ties to even
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return truncated(_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))));
}

// 32 values as KEPT terms, UNIT apart, each rounded to nearest; three of them are the values exactly.
template <int KEPT>
HP_INLINE void split_row(__m512 low, __m512 high, uint16_t* to) {
#pragma GCC unroll 3
    for (int term = 0; term < KEPT; term++) {
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_storeu_si512(to + term * UNIT, both);
        if (term + 1 == KEPT) break;
        low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16)));
        high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16)));
    }
}

// x[rows][columns] as terms, for row tiles [begin, end). Rows beyond `rows`, up to whole tiles, are zero. Also
// sums[row tile][block][16] of each block. KEPT 1: the first term alone.
template <int KEPT>
inline void split_rows(const float* x, int64_t rows, int64_t columns, int64_t begin, int64_t end, uint16_t* to, float* sums) {
    const int64_t blocks = columns / BLOCK;
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t real = std::min<int64_t>(16, rows - tile * 16), all = rows_for(rows);
        for (int64_t b = 0; b < blocks; b++) {
            uint16_t* unit = to + (tile * blocks + b) * KEPT * UNIT;
            __m512 each[16];
            for (int64_t i = 0; i < 16; i++) each[i] = _mm512_setzero_ps();
            for (int64_t i = 0; i < real; i++) {
                const float* from = x + (tile * 16 + i) * columns + b * BLOCK;
                const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
                split_row<KEPT>(low, high, unit + i * BLOCK);
                each[i] = _mm512_add_ps(low, high);
            }
            for (int64_t i = real; i < all; i++) split_row<KEPT>(_mm512_setzero_ps(), _mm512_setzero_ps(), unit + i * BLOCK);
            if constexpr (KEPT > 1) _mm512_storeu_ps(sums + (tile * blocks + b) * 16, vsums(each));
        }
    }
}

// The exact float32 values of block b of a tile as three terms; KEPT 1: rounded to one.
template <class D, int KEPT>
inline void spread_values(const uint8_t* tile, int64_t b, int64_t blocks, uint16_t* to) {
    alignas(64) float values[BLOCK][TILE];
    const __m512 scale = D::scale(tile, b, blocks, 0), minimum = D::minimum(tile, b, blocks, 0);
    D::codes(tile, b, 0, [&](V code, int k) { vstore(values[k], D::SCALED ? vfma(code, scale, minimum) : code); });
    for (int pair = 0; pair < 16; pair++) {
        __m512 even = _mm512_load_ps(values[2 * pair]), odd = _mm512_load_ps(values[2 * pair + 1]);
        if constexpr (KEPT == 1) {
            store_pair(to + pair * 32, rounded(even), rounded(odd));
            continue;
        }
        for (int term = 0; term < TERMS; term++) {
            store_pair(to + term * UNIT + pair * 32, even, odd);
            even = _mm512_sub_ps(even, truncated(even));
            odd = _mm512_sub_ps(odd, truncated(odd));
        }
    }
}

// Codes of block b of a tile as bfloat16 pairs: [column pair][16 rows][2], in `to` or in place.
inline const uint16_t* spread_codes(int64_t format, const uint8_t* tile, int64_t b, uint16_t* to) {
    if (format == BF16) return reinterpret_cast<const uint16_t*>(tile + b * 1024);
    if (format == Q4) {
        alignas(64) static const uint16_t codes[32] = {  // 0..15 as bfloat16, twice: the look-up reads five bits, four matter
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
        const __m512i table = _mm512_load_si512(codes);
        for (int group = 0; group < 4; group++) {
            const __m512i v = _mm512_loadu_si512(tile + b * 320 + group * 64);
            _mm512_store_si512(to + (group * 4 + 0) * 32, _mm512_permutexvar_epi16(v, table));
            _mm512_store_si512(to + (group * 4 + 1) * 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table));
            _mm512_store_si512(to + (group * 4 + 2) * 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table));
            _mm512_store_si512(to + (group * 4 + 3) * 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table));
        }
        return to;
    }
    for (int group = 0; group < 8; group++) {
        const __m512i v = _mm512_loadu_si512(tile + b * 512 + group * 64);
        store_pair(to + group * 64, signed_byte<0>(v), signed_byte<1>(v));
        store_pair(to + group * 64 + 32, signed_byte<2>(v), signed_byte<3>(v));
    }
    return to;
}

// A chunk of columns of up to four weight tiles, ready to be multiplied.
struct Pointers {
    const uint16_t* at[TOGETHER][CHUNK_IN_PLACE];  // [tile][block] → units of each term
};

struct Panel : Pointers {
    enum class Kind { CODES, VALUES, ROUNDED };  // one term and scales; three terms; one term

    Kind kind = Kind::CODES;
    int64_t format = F32;  // of the tiles, -1 where they differ
    int turn = 0;  // whose scales are this chunk's; those of the chunk before are still needed for sums on their way
    __m512 scales[2][TOGETHER][CHUNK], minima[2][TOGETHER][CHUNK];
    alignas(64) uint16_t units[TOGETHER * CHUNK / 2 * TERMS * UNIT];

    // How tiles are taken: float32, and tiles of different formats, by their values. BF16 is its own single term, exactly.
    void choose(const Matrix* const* matrices, int tiles, bool narrow) {
        format = matrices[0]->format;
        for (int i = 1; i < tiles; i++)
            if (matrices[i]->format != format) format = -1;
        kind = narrow ? Kind::ROUNDED : format == F32 || format == -1 ? Kind::VALUES : Kind::CODES;
    }
    bool in_place() const { return format == BF16; }
    bool scaled() const { return kind == Kind::CODES && !in_place(); }
    int chunk() const { return in_place() ? CHUNK_IN_PLACE : kind == Kind::VALUES ? CHUNK / 2 : CHUNK; }

    void fill(const Matrix* const* matrices, const uint8_t* const* tiles, int count, int64_t begin, int blocks) {
        turn ^= 1;
        for (int i = 0; i < count; i++)
            for (int b = 0; b < blocks; b++) {
                uint16_t* to = in_place() ? nullptr : units + (i * chunk() + b) * (kind == Kind::VALUES ? TERMS : 1) * UNIT;
                at[i][b] = with_decoder(matrices[i]->format, [&](auto d) { return spread<decltype(d)>(*matrices[i], tiles[i], begin + b, i, b, to); });
            }
        for (int i = count; i < TOGETHER; i++) {  // any tile stands in for a missing one, whose sums nobody reads
            for (int b = 0; b < blocks; b++) at[i][b] = at[count - 1][b];
            for (int b = 0; b < CHUNK; b++) scales[turn][i][b] = minima[turn][i][b] = _mm512_setzero_ps();
        }
    }

  private:
    template <class D>
    const uint16_t* spread(const Matrix& m, const uint8_t* tile, int64_t block, int i, int b, uint16_t* to) {
        const uint8_t* next = tile + TOGETHER * m.tile_bytes() + block * D::BYTES;
        for (int line = 0; line < D::BYTES; line += 64) __builtin_prefetch(next + line, 0, 2);  // second cache: the first is full
        if (m.format == BF16 && kind != Kind::VALUES) return reinterpret_cast<const uint16_t*>(tile + block * D::BYTES);
        if (kind == Kind::VALUES) spread_values<D, TERMS>(tile, block, m.blocks(), to);
        if (kind == Kind::ROUNDED) spread_values<D, 1>(tile, block, m.blocks(), to);
        if (kind != Kind::CODES) return to;
        if constexpr (D::SCALED) {
            scales[turn][i][b] = plain_scale<D>(tile, block, m.blocks(), 0);
            minima[turn][i][b] = D::minimum(tile, block, m.blocks(), 0);
        }
        return spread_codes(m.format, tile, block, to);
    }
};

// To be called by each thread before it multiplies so many rows, and with 0 when it is done with the unit.
inline void shape_tiles(int64_t rows) {
    if (!amx_allowed()) return;
    if (rows >= LEAST_ROWS) configure_tiles(rows_for(rows));
    else release_tiles();
}

}  // namespace
}  // namespace hp

#else

namespace hp {
namespace {
inline void shape_tiles(int64_t) {}
}  // namespace
}  // namespace hp

#endif
