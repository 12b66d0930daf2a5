// Vectors of sixteen numbers, in as many of the processor's registers as that takes, and the two number types,
// seen through *units* of four bytes, so that each algorithm is written once:
//
//     float32    a unit is one number
//     bfloat16   a unit is two neighbours along the dimension that is summed over
//
// A unit product `multiply_add` is the only place where the two differ in arithmetic. It takes one side as *factors*:
// what a number is multiplied as. A processor without products of bfloat16 multiplies float32: one side is widened
// as it is read, the other once, before it meets many columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

// What one register holds.
#if defined(__AVX512F__)
constexpr int PART_LANES = 16;
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
#else
constexpr int PART_LANES = 4;
#endif
constexpr int OF_VECTOR = LANES / PART_LANES;  // parts

// The compiler has vectors of sixteen numbers itself, but where registers are narrower it takes their comparisons and
// choices apart, number by number.
template <class Number>
struct Vector {
    typedef Number Part __attribute__((vector_size(4 * PART_LANES)));
    Part parts[OF_VECTOR];
};

typedef Vector<float> Floats;
typedef Vector<uint32_t> Units;
typedef Vector<int32_t> Integers;
typedef Floats::Part Part;
typedef Units::Part PartUnits;
typedef Integers::Part PartIntegers;

template <class Result, class Work>
static INLINE Result by_parts(const Work& work) {
    Result result;
#pragma GCC unroll 4
    for (int i = 0; i < OF_VECTOR; i++) result.parts[i] = work(i);
    return result;
}

template <class Number>
struct Scalar {
    typedef Number type;
};

#define FOR_VECTORS(OPERATOR)                                                                               \
    template <class Number>                                                                                 \
    static INLINE Vector<Number> operator OPERATOR(Vector<Number> left, Vector<Number> right) {             \
        return by_parts<Vector<Number>>([&](int i) { return left.parts[i] OPERATOR right.parts[i]; });      \
    }                                                                                                       \
    template <class Number>                                                                                 \
    static INLINE Vector<Number> operator OPERATOR(Vector<Number> left, typename Scalar<Number>::type right) { \
        return by_parts<Vector<Number>>([&](int i) { return left.parts[i] OPERATOR right; });               \
    }                                                                                                       \
    template <class Number>                                                                                 \
    static INLINE Vector<Number> operator OPERATOR(typename Scalar<Number>::type left, Vector<Number> right) { \
        return by_parts<Vector<Number>>([&](int i) { return left OPERATOR right.parts[i]; });               \
    }
FOR_VECTORS(+)
FOR_VECTORS(-)
FOR_VECTORS(*)
FOR_VECTORS(/)
FOR_VECTORS(&)
FOR_VECTORS(|)
FOR_VECTORS(<<)
FOR_VECTORS(>>)
#undef FOR_VECTORS

template <class Number>
static INLINE Vector<Number> operator-(Vector<Number> vector) {
    return by_parts<Vector<Number>>([&](int i) { return -vector.parts[i]; });
}

// A comparison has all bits of a lane set where it holds.
#define COMPARISON(OPERATOR)                                                                              \
    template <class Number>                                                                               \
    static INLINE Integers operator OPERATOR(Vector<Number> left, Vector<Number> right) {                 \
        return by_parts<Integers>([&](int i) { return left.parts[i] OPERATOR right.parts[i]; });          \
    }                                                                                                     \
    template <class Number>                                                                               \
    static INLINE Integers operator OPERATOR(Vector<Number> left, typename Scalar<Number>::type right) {  \
        return by_parts<Integers>([&](int i) { return left.parts[i] OPERATOR right; });                   \
    }
COMPARISON(<)
COMPARISON(<=)
COMPARISON(>)
COMPARISON(>=)
COMPARISON(==)
COMPARISON(!=)
#undef COMPARISON

// `left` in the lanes where a comparison held, `right` in the others.
template <class Number>
static INLINE Vector<Number> pick(Integers held, Vector<Number> left, Vector<Number> right) {
    return by_parts<Vector<Number>>([&](int i) { return held.parts[i] ? left.parts[i] : right.parts[i]; });
}

static INLINE Floats higher(Floats left, Floats right) { return pick(left > right, left, right); }

// The same bits, seen as other numbers.
template <class Other, class Number>
static INLINE Other bits_as(Vector<Number> vector) {
    return by_parts<Other>([&](int i) { return (decltype(Other::parts[0] + Other::parts[0]))vector.parts[i]; });
}

struct bfloat16 {
    uint16_t bits;
};

template <class Type>
constexpr int PER_UNIT = 4 / sizeof(Type);

template <class Type>
struct FactorOf {
    typedef Type type;
};
#ifndef __AVX512BF16__
template <>
struct FactorOf<bfloat16> {
    typedef float type;
};
#endif
template <class Type>
using Factor = typename FactorOf<Type>::type;

template <class Type>
constexpr int WORDS_PER_UNIT = PER_UNIT<Type> * sizeof(Factor<Type>) / 4;  // of factors

// Of one register, or less.
template <class Some>
static INLINE Some load(const void* from) {
    Some some;
    memcpy(&some, from, sizeof some);
    return some;
}

template <class Some>
static INLINE void store(void* to, Some some) {
    memcpy(to, &some, sizeof some);
}

template <class Number>
static INLINE Vector<Number> load_all(const Number* from) {
    return by_parts<Vector<Number>>([&](int i) { return load<typename Vector<Number>::Part>(from + i * PART_LANES); });
}

template <class Number>
static INLINE void store_all(Number* to, Vector<Number> vector) {
#pragma GCC unroll 4
    for (int i = 0; i < OF_VECTOR; i++) store(to + i * PART_LANES, vector.parts[i]);
}

static INLINE Floats broadcast(float value) {
    return by_parts<Floats>([&](int) { return value - Part{}; });
}

static INLINE Integers lane_numbers() {
    static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_all(numbers);
}

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
    Units bits = bits_as<Units>(values);
    Units rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Units quiet = (bits >> 16) | 0x40;
    return pick(values == values, rounded, quiet);
}

typedef uint16_t PartHalves __attribute__((vector_size(2 * PART_LANES)));

static INLINE Floats load_floats(const float* from) { return load_all(from); }

static INLINE Floats load_floats(const bfloat16* from) {
    return by_parts<Floats>([&](int i) {
        return (Part)(__builtin_convertvector(load<PartHalves>(from + i * PART_LANES), PartUnits) << 16);
    });
}

static INLINE void store_floats(float* to, Floats values) { store_all(to, values); }

static INLINE void store_floats(bfloat16* to, Floats values) {
#ifdef __AVX512BF16__
    store(to, _mm512_cvtneps_pbh((__m512)values.parts[0]));
#else
    Units bits = rounded_bits(values);
    for (int i = 0; i < OF_VECTOR; i++) store(to + i * PART_LANES, __builtin_convertvector(bits.parts[i], PartHalves));
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

// Numbers as factors: rounded to their type, whatever they are kept as.
template <class Type>
static INLINE void store_factors(Factor<Type>* to, Floats values) {
    if constexpr (sizeof(Factor<Type>) == sizeof(Type))
        store_floats(to, values);
    else
        store_floats(to, bits_as<Floats>(rounded_bits(values) << 16));
}

template <class Type>
static INLINE void copy_as_factors(const Type* from, int count, Factor<Type>* to) {
    if constexpr (sizeof(Factor<Type>) == sizeof(Type))
        memcpy((void*)to, from, count * sizeof(Type));
    else
        for (int i = 0; i < count; i += LANES) store_floats(to + i, load_floats(from + i, count - i), count - i);
}

// --- arithmetic --------------------------------------------------------------------------------------------

// `sums` plus the products of one unit of factors with many units, lane by lane.
template <class Type>
static INLINE Part multiply_add(Part sums, const uint32_t* left, PartUnits right);

template <>
INLINE Part multiply_add<float>(Part sums, const uint32_t* left, PartUnits right) {
    return sums + (Part)(left[0] - PartUnits{}) * (Part)right;
}

template <>
INLINE Part multiply_add<bfloat16>(Part sums, const uint32_t* left, PartUnits right) {
#ifdef __AVX512BF16__
    return (Part)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(left[0] - PartUnits{}), (__m512bh)right);
#else
    sums = sums + (Part)(left[0] - PartUnits{}) * (Part)(right << 16);
    return sums + (Part)(left[1] - PartUnits{}) * (Part)(right & 0xffff0000);
#endif
}

// Lanes folded in halves: the upper onto the lower, until one is left. Always in this order: the bits must not
// depend on who asks.
template <class Fold>
static INLINE float folded(Floats values, const Fold& fold) {
    for (int half = OF_VECTOR / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) values.parts[i] = fold(values.parts[i], values.parts[i + half]);
    Part part = values.parts[0];
#pragma GCC unroll 4
    for (int half = PART_LANES / 2; half > 0; half /= 2) part = fold(part, __builtin_shuffle(part, lane_numbers().parts[0] + half));
    return part[0];
}

static INLINE float sum_of_lanes(Floats values) {
    return folded(values, [](Part lower, Part upper) { return lower + upper; });
}

static INLINE float max_of_lanes(Floats values) {
    return folded(values, [](Part lower, Part upper) { return lower > upper ? lower : upper; });
}

// e to the power of `values`, none of them above 88, to about one unit in the last place; below -87 it is zero.
// A NaN stays one: it has to be seen in the logits. The power of two is split off, the rest is a polynomial (Cephes, expf).
static INLINE Floats exponential(Floats values) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded, into its lowest bits
    Floats lowest = broadcast(-87.0f);
    Floats bounded = higher(values, lowest);
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
    Floats result = bits_as<Floats>(bits_as<Integers>(sum) + (bits_as<Integers>(shifted) << 23));
    Floats otherwise = pick(values <= lowest, Floats{}, values);
    return pick(values > lowest, result, otherwise);
}

constexpr float LOG2_E = 1.44269504088896341f;

// Two to the power of `values`, none of them above 1, to about one unit in the last place; below -125 it is zero.
// A NaN stays one. What is left of a whole power goes into a polynomial: the best of fifth degree.
static INLINE Floats power_of_two(Floats values) {
    const float magic = 12582912.0f;
    Floats lowest = broadcast(-125.0f);
    Floats bounded = pick(values < lowest, lowest, values);
    Floats shifted = bounded + magic;
    Floats rest = bounded - (shifted - magic);
    Floats sum = broadcast(1.326472731e-3f);
    sum = sum * rest + 9.671512991e-3f;
    sum = sum * rest + 5.550733581e-2f;
    sum = sum * rest + 2.402224243e-1f;
    sum = sum * rest + 6.931470037e-1f;
    sum = sum * rest + 1.0f;
    Floats result = bits_as<Floats>(bits_as<Integers>(sum) + (bits_as<Integers>(shifted) << 23));
    return pick(values < lowest, Floats{}, result);
}

static INLINE Floats at_most(Floats values, float limit) {
    Floats limits = broadcast(limit);
    return pick(values > limits, limits, values);  // a NaN stays one
}

static INLINE Floats hyperbolic_tangent(Floats values) {
    return 1.0f - 2.0f / (exponential(at_most(values * 2.0f, 88.0f)) + 1.0f);
}
