// A mixture of experts: many small gated MLPs, of which each token has a few.
//
//     router       each token's logits, one for each expert; softmax; the likeliest are chosen, of equals the first
//     order        [ rows of expert 0 | rows of expert 1 | ... ]     each chosen expert of each token is a row
//     gate_up      the rows' products with their experts' panels, one region of all experts
//     down         the same
//     sum          of a token's rows, each times its weight, in the order of the experts
//
// A token's rows are multiplied as those of any projection are, whoever stands beside them, and its sum has one order:
// its bits do not depend on its neighbours. The router is float32, whatever the computation's type: which experts a
// token gets is decided by the smallest difference.
#pragma once

#include "quantized.hpp"

constexpr int MOST_TOKENS_MIXED = 512;  // at a time: their rows stay in the caches, and are many for each expert

struct MixtureCall {
    const void* rows;           // [T, in], of the computation's type, zero from `in` to the next multiple of 32
    int64_t row_stride;
    LinearCall router;          // as far as it is known; float32
    const LinearCall* gate_up;  // of each expert, the shared one last; as far as they are known
    const LinearCall* down;
    // Room for M = min(T, MOST_TOKENS_MIXED) tokens and their M * num_chosen rows.
    float* wide;                // [M, in, padded]
    float* logits;              // [M, columns of the router]
    float* weights;             // [M, num_chosen]
    int32_t* chosen;            // [M, num_chosen]: experts, ascending
    int32_t* places;            // [M, num_chosen]: which row that is
    int32_t* tokens;            // [rows]: whose row it is
    int32_t* experts;           // [rows]: which expert's
    char* factors;              // [rows, factor_bytes]
    void* middle;               // [rows, middle_stride], of the computation's type
    float* updates;             // [rows, out_features]
    void* out;                  // [T, out_features]
    int64_t out_stride;
    int64_t factor_bytes;
    int64_t middle_stride;
    int num_tokens;
    int num_experts;            // to be routed to
    int num_routed;             // of them, for a token
    int num_chosen;             // that, and one where there is a shared expert
    int norms_weights;
    int out_features;

    int num_mlps() const { return num_experts + num_chosen - num_routed; }
};

// One token's experts and weights. `logits` become probabilities.
static INLINE void choose_experts(const MixtureCall& it, float* logits, int32_t* chosen, float* weights) {
    int count = it.num_experts;
    float highest = logits[0], sum = 0.0f;
    for (int i = 1; i < count; i++) highest = logits[i] > highest ? logits[i] : highest;
    for (int i = 0; i < count; i += LANES) {
        // What is no number, or infinite, makes all of its token's weights so.
        Floats powers = exponential(at_most(load_floats(logits + i, count - i) - highest, 0.0f));
        store_floats(logits + i, powers, count - i);
    }
    for (int i = 0; i < count; i++) sum += logits[i];
    for (int i = 0; i < count; i++) logits[i] /= sum;
    bool is_taken[MOST_CALLS] = {};
    float taken = 0.0f;
    for (int turn = 0; turn < it.num_routed; turn++) {
        int best = -1;
        for (int i = 0; i < count; i++)
            if (!is_taken[i] && (best < 0 || logits[i] > logits[best])) best = i;
        is_taken[best] = true, taken += logits[best];
    }
    float scale = it.norms_weights ? taken : 1.0f;
    for (int i = 0; i < count; i++)
        if (is_taken[i]) *chosen++ = i, *weights++ = logits[i] / scale;
    if (it.num_chosen > it.num_routed) {
        *chosen = count;
        *weights = 1.0f / (1.0f + exponential(at_most(broadcast(-logits[count]), 88.0f)).parts[0][0]);
    }
}

// Rows into the order of their experts, which begin at `first[expert]`.
static void order_by_expert(const MixtureCall& it, int* first) {
    int num_rows = it.num_tokens * it.num_chosen, num_mlps = it.num_mlps(), at[MOST_CALLS];
    std::fill(first, first + num_mlps + 1, 0);
    for (int i = 0; i < num_rows; i++) first[it.chosen[i] + 1]++;
    for (int expert = 0; expert < num_mlps; expert++) first[expert + 1] += first[expert];
    std::copy(first, first + num_mlps, at);
    for (int i = 0; i < num_rows; i++) {
        int expert = it.chosen[i], row = at[expert]++;
        it.tokens[row] = i / it.num_chosen, it.experts[row] = expert, it.places[i] = row;
    }
}

// One row as it is multiplied: in codes where the weights are, else as factors. It is the `row`th of `first`'s.
template <class Type>
static INLINE void prepare_row(const MixtureCall& it, const LinearCall& call, int first, int row, const Type* from) {
    char* begin = it.factors + first * it.factor_bytes;
    if (call.weight_bits) return QuantizedRows{begin, call.num_units}.fill(row - first, from);
    int count = call.num_units * PER_UNIT<Type>;
    copy_as_factors(from, count, (Factor<Type>*)begin + (size_t)(row - first) * count);
}

// The products of all experts' prepared rows. `out` has `out_stride` numbers from row to row.
template <class Type, class Out>
static void multiply_all(const MixtureCall& it, const LinearCall* of, const int* first, int finishing, Out* out,
                         int64_t out_stride) {
    LinearCall calls[MOST_CALLS];
    int count = 0;
    for (int expert = 0; expert < it.num_mlps(); expert++) {
        if (first[expert] == first[expert + 1]) continue;
        LinearCall& call = calls[count++] = of[expert];
        call.rows = call.factors = it.factors + first[expert] * it.factor_bytes;
        call.row_stride = call.num_units * PER_UNIT<Type>;
        call.out = out + first[expert] * out_stride, call.out_stride = out_stride;
        call.num_rows = first[expert + 1] - first[expert];
    }
    calls[0].weight_bits ? multiply_codes<Out>(calls, count, finishing) : multiply<Type, Out>(calls, count, finishing);
}

template <class Type>
static void mix_some(const MixtureCall& it, int finishing) {
    int num_tokens = it.num_tokens, num_rows = num_tokens * it.num_chosen;
    LinearCall router = it.router;
    int width = router.num_units, num_logits = router.num_columns;
    router.rows = it.wide, router.row_stride = width, router.num_rows = num_tokens;
    router.out = it.logits, router.out_stride = num_logits;
    auto row_of = [&](int token) { return (const Type*)it.rows + token * it.row_stride; };
    prepare_rows(num_tokens, width, [&](int token) {
        for (int i = 0; i < width; i += LANES) store_floats(it.wide + (size_t)token * width + i, load_floats(row_of(token) + i));
    });
    multiply<float, float>(&router, 1, AS_IS);
    prepare_rows(num_tokens, num_logits * it.num_routed, [&](int token) {
        choose_experts(it, it.logits + (size_t)token * num_logits, it.chosen + token * it.num_chosen,
                       it.weights + token * it.num_chosen);
    });
    int first[MOST_CALLS + 1];
    order_by_expert(it, first);

    prepare_rows(num_rows, width, [&](int row) {
        int expert = it.experts[row];
        prepare_row(it, it.gate_up[expert], first[expert], row, row_of(it.tokens[row]));
    });
    multiply_all<Type, Type>(it, it.gate_up, first, finishing, (Type*)it.middle, it.middle_stride);
    prepare_rows(num_rows, (int)it.middle_stride, [&](int row) {
        int expert = it.experts[row], num_columns = it.gate_up[expert].num_columns;
        Type* middle = (Type*)it.middle + row * it.middle_stride;
        // A wider expert may have had this row before.
        memset((void*)(middle + num_columns), 0, (padded(num_columns, 32) - num_columns) * sizeof(Type));
        prepare_row(it, it.down[expert], first[expert], row, (const Type*)middle);
    });
    multiply_all<Type, float>(it, it.down, first, AS_IS, it.updates, it.out_features);

    prepare_rows(num_tokens, it.out_features * it.num_chosen, [&](int token) {
        Type* out = (Type*)it.out + token * it.out_stride;
        for (int i = 0; i < it.out_features; i += LANES) {
            int left = it.out_features - i;
            Floats sum = {};
            for (int n = token * it.num_chosen; n < (token + 1) * it.num_chosen; n++)
                sum = sum + it.weights[n] * load_floats(it.updates + (size_t)it.places[n] * it.out_features + i, left);
            store_floats(out + i, sum, left);
        }
    });
}

template <class Type>
static void mix(const MixtureCall& all, int finishing) {
    for (int token = 0; token < all.num_tokens; token += MOST_TOKENS_MIXED) {
        MixtureCall some = all;
        some.rows = (const Type*)all.rows + token * all.row_stride;
        some.out = (Type*)all.out + token * all.out_stride;
        some.num_tokens = std::min(all.num_tokens - token, MOST_TOKENS_MIXED);
        mix_some<Type>(some, finishing);
    }
}
