// Vectors of floats for the kernels: AVX-512, AVX2 with FMA, or whatever the compiler makes of plain vector code.
//
// Weights are interleaved by 16 rows whatever the machine: `LANES` of those rows are one vector, and `SUBS` vectors make
// the 16. Which set is used is decided when the part is compiled on the machine that runs it (-march=native).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hp {
namespace {  // statics of one library must not be taken for another's, which may be compiled otherwise

#define HP_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#define HP_AVX512 1
constexpr int LANES = 16;
using V = __m512;
using I = __m512i;

HP_INLINE V vzero() { return _mm512_setzero_ps(); }
HP_INLINE V vset(float x) { return _mm512_set1_ps(x); }
HP_INLINE V vload(const float* p) { return _mm512_loadu_ps(p); }
HP_INLINE void vstore(float* p, V x) { _mm512_storeu_ps(p, x); }
HP_INLINE V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
HP_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
HP_INLINE float vsum(V x) { return _mm512_reduce_add_ps(x); }
HP_INLINE float vhighest(V x) { return _mm512_reduce_max_ps(x); }
// Lane i is the sum of x[i]: each step adds neighbours and puts two vectors into one, by doubles, quads and so on.
HP_INLINE V vsums(const V* x) {
    V two[8], four[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        two[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    // each 128-bit part of four[i] has a quarter of the sums of x[4i..4i+3]
    const V a = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
    const V b = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
HP_INLINE I iload(const void* p) { return _mm512_loadu_si512(p); }
HP_INLINE V vhalf(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
HP_INLINE V vbf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
HP_INLINE V low_bf16(I v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
HP_INLINE V high_bf16(I v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
// Four bits of each lane as a float: a table look-up reads just the low four bits of its index, so nothing is masked.
template <int AT>
HP_INLINE V nibble(I v) {
    const V table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * AT), table);
}
template <int AT>
HP_INLINE V signed_byte(I v) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * AT), 24));
}
// A signed byte of each lane, times 2^24: moved to the top by one shuffle, the rest is zero.
template <int AT>
HP_INLINE V top_byte(I v) {
    constexpr int Z = static_cast<int>(0x00808080u) | AT << 24;
    const I at = _mm512_broadcast_i32x4(_mm_setr_epi32(Z, Z + (4 << 24), Z + (8 << 24), Z + (12 << 24)));
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(v, at));
}
HP_INLINE V round_nearest(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HP_INLINE V scale_by_power(V x, V power) { return _mm512_scalef_ps(x, power); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define HP_AVX2 1
constexpr int LANES = 8;
using V = __m256;
using I = __m256i;

HP_INLINE V vzero() { return _mm256_setzero_ps(); }
HP_INLINE V vset(float x) { return _mm256_set1_ps(x); }
HP_INLINE V vload(const float* p) { return _mm256_loadu_ps(p); }
HP_INLINE void vstore(float* p, V x) { _mm256_storeu_ps(p, x); }
HP_INLINE V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
HP_INLINE V vmax(V a, V b) { return _mm256_max_ps(a, b); }
HP_INLINE float vsum(V x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
HP_INLINE float vhighest(V x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// Lane i is the sum of x[i].
HP_INLINE V vsums(const V* x) {
    const V a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const V b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
HP_INLINE I iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
HP_INLINE V vhalf(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
HP_INLINE V vbf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
HP_INLINE V low_bf16(I v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
HP_INLINE V high_bf16(I v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
template <int AT>
HP_INLINE V nibble(I v) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, 4 * AT), _mm256_set1_epi32(15)));
}
template <int AT>
HP_INLINE V signed_byte(I v) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * AT), 24));
}
template <int AT>
HP_INLINE V top_byte(I v) {
    constexpr int Z = static_cast<int>(0x00808080u) | AT << 24;
    const I at = _mm256_broadcastsi128_si256(_mm_setr_epi32(Z, Z + (4 << 24), Z + (8 << 24), Z + (12 << 24)));
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(v, at));
}
HP_INLINE V round_nearest(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HP_INLINE V scale_by_power(V x, V power) {  // 2^power as the exponent field; powers here lie within -126..127
    const I biased = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

#else

#define HP_PORTABLE 1
constexpr int LANES = 4;  // SSE2, NEON
typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));

HP_INLINE V vzero() { return V{}; }
HP_INLINE V vset(float x) { return V{} + x; }
HP_INLINE V vload(const float* p) { V x; std::memcpy(&x, p, sizeof x); return x; }
HP_INLINE void vstore(float* p, V x) { std::memcpy(p, &x, sizeof x); }
HP_INLINE V vfma(V a, V b, V c) { return a * b + c; }
HP_INLINE V vmax(V a, V b) { return a > b ? a : b; }
HP_INLINE float vsum(V x) { float s = 0; for (int i = 0; i < LANES; i++) s += x[i]; return s; }
HP_INLINE float vhighest(V x) { float s = x[0]; for (int i = 1; i < LANES; i++) s = x[i] > s ? x[i] : s; return s; }
HP_INLINE V vsums(const V* x) { V s; for (int i = 0; i < LANES; i++) s[i] = vsum(x[i]); return s; }  // lane i: the sum of x[i]
HP_INLINE I iload(const void* p) { I x; std::memcpy(&x, p, sizeof x); return x; }
HP_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 0) { const float x = std::ldexp(static_cast<float>(fraction), -24); return sign ? -x : x; }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
    float x; std::memcpy(&x, &bits, 4); return x;
}
HP_INLINE V vhalf(const uint16_t* p) { V x; for (int i = 0; i < LANES; i++) x[i] = half_to_float(p[i]); return x; }
HP_INLINE V low_bf16(I v) { return reinterpret_cast<V>(v << 16); }
HP_INLINE V high_bf16(I v) { return reinterpret_cast<V>(v & static_cast<int32_t>(0xffff0000u)); }
HP_INLINE V vbf16(const uint16_t* p) { I x; for (int i = 0; i < LANES; i++) x[i] = p[i]; return low_bf16(x); }
template <int AT>
HP_INLINE V nibble(I v) { return __builtin_convertvector((v >> (4 * AT)) & 15, V); }
template <int AT>
HP_INLINE V signed_byte(I v) { return __builtin_convertvector((v << (24 - 8 * AT)) >> 24, V); }
template <int AT>
HP_INLINE V top_byte(I v) { return __builtin_convertvector((v << (24 - 8 * AT)) & static_cast<int32_t>(0xff000000u), V); }
HP_INLINE V round_nearest(V x) { for (int i = 0; i < LANES; i++) x[i] = std::nearbyint(x[i]); return x; }
HP_INLINE V scale_by_power(V x, V power) {
    const I biased = __builtin_convertvector(power, I) + 127;
    return x * reinterpret_cast<V>(biased << 23);
}

#endif

constexpr int TILE = 16;             // rows of a weight that are interleaved
constexpr int SUBS = TILE / LANES;   // vectors that hold one value of each of those rows

// e^x for x <= 0 and moderate x > 0. Range reduction by ln 2 in two parts, then a degree-6 polynomial (Cephes expf
// coefficients): below 2 ulp. Underflow ends at 2^-126 instead of 0, which no sum here can notice.
HP_INLINE V vexp(V x) {
    x = vmax(x, vset(-87.0f));
    x = V(-vmax(-x, vset(-88.0f)));
    const V n = round_nearest(x * vset(1.44269504088896341f));
    V r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    V p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, r * r, r + vset(1.0f));
    return scale_by_power(p, n);
}

HP_INLINE V silu(V x) { return x / (vset(1.0f) + vexp(-x)); }

// Scratch begins at a cache line: a vector that lies across two takes two loads.
template <class T>
struct AlignedAllocator {
    using value_type = T;
    AlignedAllocator() = default;
    template <class U>
    AlignedAllocator(const AlignedAllocator<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
    bool operator==(const AlignedAllocator&) const { return true; }
    bool operator!=(const AlignedAllocator&) const { return false; }
};

template <class T>
using Aligned = std::vector<T, AlignedAllocator<T>>;
using Floats = Aligned<float>;

}  // namespace
}  // namespace hp
