// Vectors of sixteen floats, whatever the processor has: the compiler cuts them to its registers. And the two
// number types, seen through *units* of four bytes, so that each algorithm is written once:
//
//     float32    a unit is one number
//     bfloat16   a unit is two neighbours along the dimension that is summed over
//
// A unit product `multiply_add` is the only place where the two differ in arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Units __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));

struct bfloat16 {
    uint16_t bits;
};

template <class Type>
constexpr int PER_UNIT = 4 / sizeof(Type);

template <class Vector>
static INLINE Vector load(const void* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
static INLINE void store(void* to, Vector vector) {
    memcpy(to, &vector, sizeof vector);
}

static INLINE Floats broadcast(float value) { return value - Floats{}; }
static INLINE Integers lane_numbers() { return Integers{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// --- number types ------------------------------------------------------------------------------------------

static INLINE float widened(float value) { return value; }
static INLINE float widened(bfloat16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To nearest, ties to even; a NaN stays one.
static INLINE Units rounded_bits(Floats values) {
    Units bits = (Units)values;
    Units rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Units quiet = (bits >> 16) | 0x40;
    return (values == values) ? rounded : quiet;
}

template <class Type>
static INLINE Floats load_floats(const Type* from);

template <>
INLINE Floats load_floats<float>(const float* from) {
    return load<Floats>(from);
}

template <>
INLINE Floats load_floats<bfloat16>(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    return (Floats)(__builtin_convertvector(load<Halves>(from), Units) << 16);
}

static INLINE void store_floats(float* to, Floats values) { store(to, values); }

static INLINE void store_floats(bfloat16* to, Floats values) {
#ifdef __AVX512BF16__
    store(to, _mm512_cvtneps_pbh((__m512)values));
#else
    typedef uint16_t Halves __attribute__((vector_size(32)));
    store(to, __builtin_convertvector(rounded_bits(values), Halves));
#endif
}

// The first `count` of sixteen; the lanes behind them are zero.
template <class Type>
static INLINE Floats load_floats(const Type* from, int count) {
    if (count >= LANES) return load_floats(from);
    Type padded[LANES] = {};
    memcpy(padded, from, (size_t)count * sizeof(Type));
    return load_floats(padded);
}

template <class Type>
static INLINE void store_floats(Type* to, Floats values, int count) {
    if (count >= LANES) return store_floats(to, values);
    Type padded[LANES];
    store_floats(padded, values);
    memcpy(to, padded, (size_t)count * sizeof(Type));
}

// --- arithmetic --------------------------------------------------------------------------------------------

// What the processor holds in one register: products work on these, lest the compiler spill the wide ones.
#if defined(__AVX512F__)
constexpr int PART_LANES = 16;
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
#else
constexpr int PART_LANES = 4;
#endif
typedef float Part __attribute__((vector_size(4 * PART_LANES)));
typedef uint32_t PartUnits __attribute__((vector_size(4 * PART_LANES)));

// `sums` plus the products of one unit with many, lane by lane.
template <class Type>
static INLINE Part multiply_add(Part sums, uint32_t left, PartUnits right);

template <>
INLINE Part multiply_add<float>(Part sums, uint32_t left, PartUnits right) {
    return sums + (Part)(left - PartUnits{}) * (Part)right;
}

template <>
INLINE Part multiply_add<bfloat16>(Part sums, uint32_t left, PartUnits right) {
#ifdef __AVX512BF16__
    return (Part)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(left - PartUnits{}), (__m512bh)right);
#else
    PartUnits both = left - PartUnits{};
    sums = sums + (Part)(both << 16) * (Part)(right << 16);
    return sums + (Part)(both & 0xffff0000) * (Part)(right & 0xffff0000);
#endif
}

// Lanes folded in halves: the upper onto the lower, until one is left. Always in this order: the bits must not
// depend on who asks.
template <class Fold>
static INLINE float folded(Floats values, const Fold& fold) {
    values = fold(values, __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1));
    values = fold(values, __builtin_shufflevector(values, values, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    values = fold(values, __builtin_shufflevector(values, values, 2, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    values = fold(values, __builtin_shufflevector(values, values, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    return values[0];
}

static INLINE float sum_of_lanes(Floats values) {
    return folded(values, [](Floats lower, Floats upper) { return lower + upper; });
}

static INLINE float max_of_lanes(Floats values) {
    return folded(values, [](Floats lower, Floats upper) { return lower > upper ? lower : upper; });
}

// e to the power of `values`, none of them above 88, to about one unit in the last place; below -87 it is zero.
// A NaN stays one: it has to be seen in the logits. The power of two is split off, the rest is a polynomial (Cephes, expf).
static INLINE Floats exponential(Floats values) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded, into its lowest bits
    Floats lowest = broadcast(-87.0f);
    Floats bounded = values > lowest ? values : lowest;
    Floats shifted = bounded * 1.44269504088896341f + magic;
    Floats power = shifted - magic;
    Floats rest = bounded - power * 0.693359375f;
    rest = rest + power * 2.12194440e-4f;
    Floats sum = broadcast(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    Floats result = (Floats)((Integers)sum + ((Integers)shifted << 23));
    Floats otherwise = values <= lowest ? Floats{} : values;
    return values > lowest ? result : otherwise;
}

constexpr float LOG2_E = 1.44269504088896341f;

// Two to the power of `values`, none of them above 1, to about one unit in the last place; below -125 it is zero.
// A NaN stays one. What is left of a whole power goes into a polynomial: the best of fifth degree.
static INLINE Floats power_of_two(Floats values) {
    const float magic = 12582912.0f;
    Floats lowest = broadcast(-125.0f);
    Floats bounded = values < lowest ? lowest : values;
    Floats shifted = bounded + magic;
    Floats rest = bounded - (shifted - magic);
    Floats sum = broadcast(1.326472731e-3f);
    sum = sum * rest + 9.671512991e-3f;
    sum = sum * rest + 5.550733581e-2f;
    sum = sum * rest + 2.402224243e-1f;
    sum = sum * rest + 6.931470037e-1f;
    sum = sum * rest + 1.0f;
    Floats result = (Floats)((Integers)sum + ((Integers)shifted << 23));
    return values < lowest ? Floats{} : result;
}

static INLINE Floats at_most(Floats values, float limit) {
    Floats limits = broadcast(limit);
    return values > limits ? limits : values;  // a NaN stays one
}

static INLINE Floats hyperbolic_tangent(Floats values) {
    return 1.0f - 2.0f / (exponential(at_most(values * 2.0f, 88.0f)) + 1.0f);
}
