// Projections whose weights are kept in 8 or 4 bits. Both sides are cut into blocks of 32 numbers along the
// dimension that is summed over, and each block has numbers of its own beside its codes:
//
//     weight    scale * code + offset     codes are unsigned: 0 to 255, or 0 to 15
//     row       scale * code              codes are signed: -127 to 127, made for each product
//
// So a block of a row times a block of a column is a sum of products of small integers, which is exact:
//
//     row.scale * column.scale * sum(row.code * column.code)  +  row.scale * sum(row.code) * column.offset
//
// Blocks are summed in ascending order in float32: a row's bits do not depend on its neighbours. A packed weight
// lies in panels of sixteen columns, as those of linear.hpp do, and a block of a panel is
//
//     [ 16 scales, float16 | 16 offsets, float16 | codes: unit | 16 lanes | 4 bytes ]
//
// where a unit is four neighbours of a column in 8 bits, or eight in 4 bits: the first four in the lower halves of
// their bytes, the last four in the upper ones. The arithmetic is that of llama.cpp's Q8_0 times Q4_1 (ggml/src/ggml-quants.c).
#pragma once

#include <immintrin.h>

#include "linear.hpp"

constexpr int BLOCK = 32;  // numbers that share a scale
constexpr int CODES_PER_UNIT = 4;

static INLINE size_t block_bytes(int bits) { return LANES * (2 * sizeof(uint16_t) + BLOCK * bits / 8); }

// --- float16, in which scales and offsets are kept -----------------------------------------------------------

static INLINE float widened_half(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    wide *= 0x1p112f;  // the difference of the exponents' biases; right for subnormal numbers too
    return half & 0x8000 ? -wide : wide;
}

static INLINE Part load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (Part)_mm256_cvtph_ps(load<__m128i>(from));
#else
    PartUnits bits = __builtin_convertvector(load<PartHalves>(from), PartUnits);
    Part wide = (Part)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Part)((PartUnits)wide | (bits & 0x8000) << 16);
#endif
}

// --- products of codes ---------------------------------------------------------------------------------------

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define ADDS_FOUR_PRODUCTS
#endif

#ifdef ADDS_FOUR_PRODUCTS
constexpr int MOST_BITS = 8;  // of a weight's code that `add_products` takes; wider ones are taken in halves
#else
constexpr int MOST_BITS = 4;
#endif

// The sums of one block's products, lane by lane: in 32 bits where the processor adds four products at once, else in
// pairs of 16 bits, of which those of a block are at most 8 * 2 * 15 * 127 < 2^15.
#ifdef ADDS_FOUR_PRODUCTS
typedef PartIntegers Dots;
#else
typedef int16_t Dots __attribute__((vector_size(4 * PART_LANES)));
#endif

// `dots` plus the products of four codes of a row with four of each lane.
static INLINE Dots add_products(Dots dots, PartUnits codes, uint32_t row) {
    PartUnits rows = row - PartUnits{};
#if defined(__AVX512VNNI__)
    return (Dots)_mm512_dpbusd_epi32((__m512i)dots, (__m512i)codes, (__m512i)rows);
#elif defined(__AVXVNNI__)
    return (Dots)_mm256_dpbusd_avx_epi32((__m256i)dots, (__m256i)codes, (__m256i)rows);
#elif defined(__AVX512BW__)
    return dots + (Dots)_mm512_maddubs_epi16((__m512i)codes, (__m512i)rows);
#elif defined(__AVX2__)
    return dots + (Dots)_mm256_maddubs_epi16((__m256i)codes, (__m256i)rows);
#else
    return dots + (Dots)_mm_maddubs_epi16((__m128i)codes, (__m128i)rows);
#endif
}

static INLINE PartIntegers total(Dots dots) {
#ifdef ADDS_FOUR_PRODUCTS
    return dots;
#elif defined(__AVX512BW__)
    return (PartIntegers)_mm512_madd_epi16((__m512i)dots, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return (PartIntegers)_mm256_madd_epi16((__m256i)dots, _mm256_set1_epi16(1));
#else
    return (PartIntegers)_mm_madd_epi16((__m128i)dots, _mm_set1_epi16(1));
#endif
}

// --- rows ----------------------------------------------------------------------------------------------------

// Rows in codes: `[rows | codes, int8 | scales, float32 | sums, float32]`, a scale and a sum for each block. A sum
// is that of the block's codes, times its scale.
struct QuantizedRows {
    static constexpr size_t BLOCK_BYTES = BLOCK + 2 * sizeof(float);
    char* begin;
    int num_blocks;

    size_t row_bytes() const { return num_blocks * BLOCK_BYTES; }
    int8_t* codes(int row) const { return (int8_t*)(begin + row * row_bytes()); }
    float* scales(int row) const { return (float*)(codes(row) + num_blocks * BLOCK); }
    float* sums(int row) const { return scales(row) + num_blocks; }

    template <class Type>
    void fill(int row, const Type* from) const;
};

// The nearest whole numbers, ties to even, of numbers below 2^22.
static INLINE Integers rounded(Floats values) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded, into its lowest bits
    return bits_as<Integers>(values + magic) - bits_as<Integers>(broadcast(magic));
}

template <class Type>
void QuantizedRows::fill(int row, const Type* from) const {
    int8_t* codes = this->codes(row);
    float *scales = this->scales(row), *sums = this->sums(row);
    typedef int8_t PartCodes __attribute__((vector_size(PART_LANES)));
    for (int block = 0; block < num_blocks; block++, from += BLOCK, codes += BLOCK) {
        Floats lower = load_floats(from), upper = load_floats(from + LANES);
        Floats lower_sizes = higher(lower, -lower), upper_sizes = higher(upper, -upper);
        float largest = max_of_lanes(higher(lower_sizes, upper_sizes));
        // What is no number, or infinite, is to be seen in the result; a maximum may miss it.
        bool is_finite = sum_of_lanes((lower - lower) + (upper - upper)) == 0.0f;
        float inverse = is_finite && largest > 1e-30f ? 127.0f / largest : 0.0f;
        if (!is_finite) lower = upper = Floats{};
        Integers of_lower = rounded(lower * inverse), of_upper = rounded(upper * inverse);
#pragma GCC unroll 4
        for (int i = 0; i < OF_VECTOR; i++) {
            store(codes + i * PART_LANES, __builtin_convertvector(of_lower.parts[i], PartCodes));
            store(codes + LANES + i * PART_LANES, __builtin_convertvector(of_upper.parts[i], PartCodes));
        }
        Integers both = of_lower + of_upper;
        Floats counts = by_parts<Floats>([&](int i) { return __builtin_convertvector(both.parts[i], Part); });
        scales[block] = is_finite ? largest / 127.0f : __builtin_nanf("");
        sums[block] = scales[block] * sum_of_lanes(counts);
    }
}

// --- products ------------------------------------------------------------------------------------------------

// Some rows, from `first` on, with some neighbouring parts of a pair of panels.
template <int BITS, int ROWS, int PARTS>
static INLINE void quantized_sums(const QuantizedRows& rows, int first, const char* pair, int first_part, float* c) {
    constexpr bool IN_HALVES = BITS > MOST_BITS;
    constexpr int NUM_UNITS = BLOCK * BITS / 8 / CODES_PER_UNIT, WORDS = BLOCK / CODES_PER_UNIT;
    Part sums[ROWS][PARTS] = {};
    const uint32_t* codes = (const uint32_t*)rows.codes(first);
    const float *scales = rows.scales(first), *row_sums = rows.sums(first);
    size_t stride = rows.row_bytes() / 4;
    const char* parts[PARTS];
    int lanes[PARTS];
    for (int j = 0; j < PARTS; j++) {
        parts[j] = pair + (first_part + j) / OF_VECTOR * rows.num_blocks * block_bytes(BITS);
        lanes[j] = (first_part + j) % OF_VECTOR * PART_LANES;
    }
    for (int block = 0; block < rows.num_blocks; block++, codes += WORDS) {
        Dots dots[ROWS][PARTS] = {}, upper_dots[ROWS][PARTS] = {};
        size_t begin = block * block_bytes(BITS);
#pragma GCC unroll 1  // else the compiler makes all products before it adds them, and keeps them in memory
        for (int unit = 0; unit < NUM_UNITS; unit++) {
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; j++) {
                PartUnits bytes = load<PartUnits>((const uint32_t*)(parts[j] + begin) + (1 + unit) * LANES + lanes[j]);
                PartUnits lower = bytes & 0x0f0f0f0f, upper = (bytes >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) {
                    const uint32_t* words = codes + i * stride;
                    if (IN_HALVES) {
                        dots[i][j] = add_products(dots[i][j], lower, words[unit]);
                        upper_dots[i][j] = add_products(upper_dots[i][j], upper, words[unit]);
                    } else if (BITS == 8) {
                        dots[i][j] = add_products(dots[i][j], bytes, words[unit]);
                    } else {
                        dots[i][j] = add_products(dots[i][j], lower, words[2 * unit]);
                        dots[i][j] = add_products(dots[i][j], upper, words[2 * unit + 1]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; j++) {
            const uint16_t* numbers = (const uint16_t*)(parts[j] + begin) + lanes[j];
            Part scale = load_halves(numbers), offset = load_halves(numbers + LANES);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                PartIntegers dot = total(dots[i][j]);
                if (IN_HALVES) dot += total(upper_dots[i][j]) << 4;
                Part both = scale * scales[i * stride + block];
                sums[i][j] = sums[i][j] + both * __builtin_convertvector(dot, Part);
                sums[i][j] = sums[i][j] + offset * row_sums[i * stride + block];
            }
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PARTS; j++) store(c + i * PAIR + (first_part + j) * PART_LANES, sums[i][j]);
}

#ifdef __AVX512F__
constexpr int QUANTIZED_ROWS = 6;  // 6 x 2 sums of codes and as many of numbers in 32 registers
#else
constexpr int QUANTIZED_ROWS = 4;  // their 4 x 2 sums of numbers stay in memory
#endif

template <int BITS, int ROWS>
static INLINE void quantized_pair(const QuantizedRows& rows, int first, const char* pair, float* c) {
    constexpr int PARTS = PARTS_TOGETHER<ROWS, 2>;
    for (int part = 0; part < 2 * OF_VECTOR; part += PARTS) quantized_sums<BITS, ROWS, PARTS>(rows, first, pair, part, c);
}

template <int BITS>
static void quantized_product(const QuantizedRows& rows, int first, int num_rows, const char* pair, float* c) {
    int row = 0;
    for (; row + QUANTIZED_ROWS <= num_rows; row += QUANTIZED_ROWS)
        quantized_pair<BITS, QUANTIZED_ROWS>(rows, first + row, pair, c + row * PAIR);
#ifdef __AVX512F__
    for (; row + 4 <= num_rows; row += 4) quantized_pair<BITS, 4>(rows, first + row, pair, c + row * PAIR);
#endif
    for (; row + 2 <= num_rows; row += 2) quantized_pair<BITS, 2>(rows, first + row, pair, c + row * PAIR);
    for (; row < num_rows; row++) quantized_pair<BITS, 1>(rows, first + row, pair, c + row * PAIR);
}

// Products whose rows are codes, in `factors`.
template <class Out>
static void multiply_codes(const LinearCall* calls, int count, int finishing) {
    for_pairs(calls, count, QuantizedRows::BLOCK_BYTES, MOST_ROWS,
              [&](const LinearCall& it, int pair, int row, int num_rows, bool) {
                  alignas(64) float sums[MOST_ROWS * PAIR];
                  QuantizedRows rows{(char*)it.factors, it.num_units};
                  const char* panels = (const char*)it.weight + pair * 2 * it.num_units * block_bytes(it.weight_bits);
                  if (it.weight_bits == 4)
                      quantized_product<4>(rows, row, num_rows, panels, sums);
                  else
                      quantized_product<8>(rows, row, num_rows, panels, sums);
                  finish<Out>(it, finishing, sums, row, num_rows, pair);
              });
}

template <class Type, class Out>
static void quantized_linear(const LinearCall& it, int finishing) {
    QuantizedRows rows{(char*)it.factors, it.num_units};
    prepare_rows(it.num_rows, rows.num_blocks * BLOCK,
                 [&](int row) { rows.fill(row, (const Type*)it.rows + row * it.row_stride); });
    multiply_codes<Out>(&it, 1, finishing);
}

// --- once per model, and embeddings --------------------------------------------------------------------------

// Where the code of number `n` of a lane's block stands.
struct CodePlace {
    int byte;   // from the block's begin
    int shift;  // within it
};

static INLINE CodePlace code_place(int bits, int lane, int n) {
    int word = n / CODES_PER_UNIT, unit = bits == 4 ? word / 2 : word;
    int byte = 2 * LANES * (int)sizeof(uint16_t) + (unit * LANES + lane) * CODES_PER_UNIT + n % CODES_PER_UNIT;
    return {byte, bits == 4 && word % 2 ? 4 : 0};
}

struct PackingCall {
    const uint8_t* codes;     // [num_rows, num_blocks * BLOCK]
    const uint16_t* scales;   // [num_rows, num_blocks], float16
    const uint16_t* offsets;  // [num_rows, num_blocks], float16
    uint8_t* packed;
    int num_rows, num_blocks, bits, gated;
};

static void pack_quantized(const PackingCall& it) {
    int num_columns = it.gated ? 2 * padded(it.num_rows / 2, LANES) : padded(it.num_rows, PAIR);
    size_t bytes = block_bytes(it.bits);
    pool().run(num_columns / LANES, [&](int panel) {
        for (int lane = 0; lane < LANES; lane++) {
            int row = source_row(panel * LANES + lane, it.num_rows, it.gated);
            if (row >= it.num_rows) continue;  // zeros stay
            for (int block = 0; block < it.num_blocks; block++) {
                size_t from = (size_t)row * it.num_blocks + block;
                uint8_t* to = it.packed + ((size_t)panel * it.num_blocks + block) * bytes;
                ((uint16_t*)to)[lane] = it.scales[from], ((uint16_t*)to)[LANES + lane] = it.offsets[from];
                for (int n = 0; n < BLOCK; n++) {
                    CodePlace place = code_place(it.bits, lane, n);
                    to[place.byte] |= it.codes[from * BLOCK + n] << place.shift;
                }
            }
        }
    });
}

// The tokens' rows of a packed weight, times `scale`.
static void quantized_embed(const EmbedCall& it) {
    size_t bytes = block_bytes(it.weight_bits);
    int mask = (1 << it.weight_bits) - 1;
    for_rows(it.num_tokens, [&](int token) {
        int64_t id = it.step->token_ids[token];
        int lane = id % LANES;
        const uint8_t* block = (const uint8_t*)it.weight + id / LANES * it.num_units * bytes;
        float* to = it.hidden + token * it.hidden_stride;
        for (int first = 0; first < it.in; first += BLOCK, block += bytes) {
            float scale = it.scale * widened_half(((const uint16_t*)block)[lane]);
            float offset = it.scale * widened_half(((const uint16_t*)block)[LANES + lane]);
            for (int n = 0; n < BLOCK && first + n < it.in; n++) {
                CodePlace place = code_place(it.weight_bits, lane, n);
                to[first + n] = scale * (float)(block[place.byte] >> place.shift & mask) + offset;
            }
        }
    });
}
