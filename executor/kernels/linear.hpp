// Projections. A packed weight `[out, in]`, in panels of sixteen output columns:
//
//     [ out / 16 | in / PER_UNIT | 16 lanes | PER_UNIT ]     both dimensions padded with zeros:
//       panel      unit            column     number          in to 32 numbers, out to 32 columns
//
// One panel is read from its begin to its end, whatever the number of rows. The second projection of a gated
// MLP is packed with it, panel by panel: gate, up, gate, up; so a pair of panels holds both sides of a product
// and the activation is applied before anything is stored.
#pragma once

#include "pool.hpp"
#include "product.hpp"
#include "rows.hpp"

enum Finish { AS_IS = 0, SILU_GATE = 1, GELU_TANH_GATE = 2, SOFT_CAP = 3 };

constexpr int PAIR = 2 * LANES;             // columns of two panels
constexpr size_t SLAB_BYTES = 768 * 1024;   // of rows: they stay in the core's cache while panels go by

static INLINE int padded(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// Column `column` of the packed order is row `row` of the weight; none where the result is `num_rows` or more.
static INLINE int source_row(int column, int num_rows, bool gated) {
    if (!gated) return column;
    int half = num_rows / 2, panel = column / LANES, place = panel / 2 * LANES + column % LANES;
    if (place >= half) return num_rows;
    return panel % 2 == 0 ? place : half + place;
}

template <class Type>
static void pack(const Type* weight, int num_rows, int in, bool gated, Type* packed) {
    constexpr int PER = PER_UNIT<Type>;
    int num_units = padded(in, 32) / PER;
    int num_columns = gated ? 2 * padded(num_rows / 2, LANES) : padded(num_rows, PAIR);
    pool().run(num_columns / LANES, [&](int panel) {
        Type* to = packed + (size_t)panel * num_units * LANES * PER;
        const Type* from[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            int row = source_row(panel * LANES + lane, num_rows, gated);
            from[lane] = row < num_rows ? weight + (size_t)row * in : nullptr;
        }
        for (int unit = 0; unit < num_units; unit++)
            for (int lane = 0; lane < LANES; lane++)
                for (int part = 0; part < PER; part++) {
                    int number = unit * PER + part;
                    *to++ = from[lane] && number < in ? from[lane][number] : Type{};
                }
    });
}

struct LinearCall {
    const void* rows;        // numbers of the computation's type, zero from `in` to the next multiple of 32
    int64_t row_stride;      // numbers from row to row
    const void* weight;      // packed
    void* factors;           // room for the rows as they are multiplied: 4 bytes for a number
    const float* bias;       // in packed order, padded like the columns; or null
    void* out;
    int64_t out_stride;      // numbers from row to row
    int num_rows;
    int num_units;           // of a panel; blocks of a panel of codes
    int num_pairs;           // of panels
    int num_columns;         // of the result
    int weight_bits;         // of a code: 8, 4; or 0
    float soft_cap;
};

template <class Out>
static INLINE void finish(const LinearCall& it, int finishing, const float* sums, int row, int num_rows, int pair) {
    bool gated = finishing == SILU_GATE || finishing == GELU_TANH_GATE;
    int width = gated ? LANES : PAIR, first = pair * width;
    Floats bias[2] = {};
    if (it.bias) bias[0] = load_floats(it.bias + pair * PAIR), bias[1] = load_floats(it.bias + pair * PAIR + LANES);
    for (int i = 0; i < num_rows; i++) {
        Floats left = load_floats(sums + i * PAIR) + bias[0], right = load_floats(sums + i * PAIR + LANES) + bias[1];
        Out* out = (Out*)it.out + (row + i) * it.out_stride + first;
        switch (finishing) {
            case SILU_GATE:
                left = left / (1.0f + exponential(at_most(-left, 88.0f))) * right;
                break;
            case GELU_TANH_GATE: {
                Floats inner = 0.7978845608028654f * (left + 0.044715f * left * left * left);
                left = 0.5f * left * (1.0f + hyperbolic_tangent(inner)) * right;
                break;
            }
            case SOFT_CAP:
                left = it.soft_cap * hyperbolic_tangent(left / it.soft_cap);
                right = it.soft_cap * hyperbolic_tangent(right / it.soft_cap);
                break;
        }
        store_floats(out, left, it.num_columns - first);
        if (!gated && first + LANES < it.num_columns) store_floats(out + LANES, right, it.num_columns - first - LANES);
    }
}

constexpr int MOST_CALLS = 1025;  // of products computed together: the experts of a layer, and a shared one

// Calls `work(call, pair, row, num_rows, is_first)` for each pair of panels of each of `count` products, with at most
// `most_rows` rows at a time: a thread has one pair after the other, and for each of them all rows of a slab.
// `is_first` says that nobody read the pair before. A unit of a row has `unit_bytes`.
template <class Work>
static INLINE void for_pairs(const LinearCall* calls, int count, size_t unit_bytes, int most_rows, const Work& work) {
    auto slab_of = [&](const LinearCall& it) { return padded((int)(SLAB_BYTES / (it.num_units * unit_bytes)) + 1, most_rows); };
    auto num_slabs_of = [&](const LinearCall& it) { return (it.num_rows + slab_of(it) - 1) / slab_of(it); };
    int num_pairs = 0;
    for (const LinearCall* it = calls; it < calls + count; it++) num_pairs += it->num_pairs * num_slabs_of(*it);
    // Few rows: larger chunks, so that a thread reads on where it is.
    int wanted = 8 * pool().num_threads();
    int pairs_per_chunk = num_pairs > wanted ? num_pairs / wanted : 1;
    auto chunks_per_slab_of = [&](const LinearCall& it) { return (it.num_pairs + pairs_per_chunk - 1) / pairs_per_chunk; };
    int first_chunk[MOST_CALLS + 1];
    first_chunk[0] = 0;
    for (int i = 0; i < count; i++) first_chunk[i + 1] = first_chunk[i] + num_slabs_of(calls[i]) * chunks_per_slab_of(calls[i]);
    pool().run(first_chunk[count], [&](int chunk) {
        int index = (int)(std::upper_bound(first_chunk, first_chunk + count, chunk) - first_chunk) - 1;
        const LinearCall& it = calls[index];
        int slab = slab_of(it), chunks_per_slab = chunks_per_slab_of(it);
        chunk -= first_chunk[index];
        int first_row = chunk / chunks_per_slab * slab, first_pair = chunk % chunks_per_slab * pairs_per_chunk;
        int end_row = first_row + slab < it.num_rows ? first_row + slab : it.num_rows;
        int end_pair = first_pair + pairs_per_chunk < it.num_pairs ? first_pair + pairs_per_chunk : it.num_pairs;
        for (int pair = first_pair; pair < end_pair; pair++)
            for (int row = first_row; row < end_row; row += most_rows)
                work(it, pair, row, row + most_rows < end_row ? most_rows : end_row - row, row == first_row);
        release_tiles();
    });
}

constexpr int FEW_NUMBERS = 8192;  // not worth a second thread

// Calls `work(row)` for each row, before the product.
template <class Work>
static INLINE void prepare_rows(int num_rows, int row_numbers, const Work& work) {
    if ((int64_t)num_rows * row_numbers > FEW_NUMBERS) return for_rows(num_rows, work);
    for (int row = 0; row < num_rows; row++) work(row);
}

// Products whose rows are factors.
template <class Type, class Out>
static void multiply(const LinearCall* calls, int count, int finishing) {
    constexpr int ROWS = HAS_TILES<Type> ? MOST_ROWS : 2 * REGISTER_ROWS;
    for_pairs(calls, count, WORDS_PER_UNIT<Type> * sizeof(uint32_t), ROWS,
              [&](const LinearCall& it, int pair, int row, int num_rows, bool is_first) {
                  alignas(64) float sums[MOST_ROWS * PAIR];
                  size_t panel_units = (size_t)it.num_units * LANES, stride = it.row_stride * sizeof(Factor<Type>) / 4;
                  const uint32_t* panel = (const uint32_t*)it.weight + 2 * pair * panel_units;
                  product<Type, 2>({(const uint32_t*)it.rows + row * stride, stride, &panel, (ptrdiff_t)panel_units,
                                    LANES, 1, it.num_units, sums, PAIR, is_first},
                                   num_rows);
                  finish<Out>(it, finishing, sums, row, num_rows, pair);
              });
}

template <class Type, class Out>
static void linear(LinearCall it, int finishing) {
    if (sizeof(Factor<Type>) != sizeof(Type)) {
        int count = it.num_units * PER_UNIT<Type>;
        Factor<Type>* factors = (Factor<Type>*)it.factors;
        prepare_rows(it.num_rows, count, [&](int row) {
            copy_as_factors((const Type*)it.rows + row * it.row_stride, count, factors + (size_t)row * count);
        });
        it.rows = factors, it.row_stride = count;
    }
    multiply<Type, Out>(&it, 1, finishing);
}

struct EmbedCall {
    const void* weight;      // packed
    const StepArrays* step;
    float* hidden;           // [T, in]
    int64_t hidden_stride;
    int num_tokens;
    int num_units;           // of a panel; blocks of a panel of codes
    int in;
    int weight_bits;         // of a code: 8, 4; or 0
    float scale;
};

// The tokens' rows of a packed weight, times `scale`: embeddings that are the output head as well.
template <class Type>
static void embed(const EmbedCall& it) {
    constexpr int PER = PER_UNIT<Type>;
    for_rows(it.num_tokens, [&](int token) {
        int64_t id = it.step->token_ids[token];
        const Type* from = (const Type*)it.weight + ((size_t)(id / LANES) * it.num_units * LANES + id % LANES) * PER;
        float* to = it.hidden + token * it.hidden_stride;
        for (int n = 0; n < it.in; n++) to[n] = it.scale * widened(from[(size_t)(n / PER) * LANES * PER + n % PER]);
    });
}
