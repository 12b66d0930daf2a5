// Chooses one token from a row of logits: the most likely one, or one drawn by inverse CDF. What the filters
// mean is said in executor/sampler.py; here they are found without sorting the vocabulary.
//
// In descending order of likelihood (ties: the lower id first) the tokens that stay are a prefix, for each filter
// and so for all of them. Its end is found by a histogram over the leading bits of the likelihoods, which for
// positive floats stand in the order of the numbers; only the bucket that holds the end is sorted.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "pool.hpp"
#include "vector.hpp"

struct SamplingCall {
    const float* logits;       // [S, vocab_size]
    int64_t stride;
    const double* uniforms;    // [S], in [0, 1)
    const double* temperatures; // [S]; 0: the most likely token
    const double* top_p;       // [S]
    const double* min_p;       // [S]
    const int64_t* top_k;      // [S]; vocab_size: off
    int64_t* token_ids;        // [S], out
    float* highest;            // [S], out: the highest logit; NaN if there is one
    int num_rows, vocab_size;
};

constexpr int BUCKET_SHIFT = 20;                        // sign, exponent and three bits more
constexpr int NUM_BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1;  // likelihoods are at most 1

constexpr int SPAN = 256;  // tokens whose sum is kept: a draw skips those before it span by span

// The last token that stays: those before it in descending order stay too.
struct Cut {
    uint32_t bits;
    int token_id;
    double mass;  // of all that stay

    bool keeps(uint32_t other, int id) const { return other > bits || (other == bits && id <= token_id); }
};

struct Likelihoods {
    std::vector<float> of;
    std::vector<double> sums;  // of each SPAN of them
    int64_t counts[NUM_BUCKETS];
    double masses[NUM_BUCKETS];
    std::vector<std::pair<uint32_t, int>> sorted;
    std::vector<int> kept;

    uint32_t bits(int id) const {
        uint32_t found;
        memcpy(&found, &of[id], 4);
        return found;
    }

    // Likelihoods relative to the highest logit, which gets 1. Returns their sum.
    double fill(const float* logits, int count, float highest, double temperature) {
        typedef float Eight __attribute__((vector_size(32)));
        typedef double Doubles __attribute__((vector_size(64)));
        of.resize((size_t)(count + SPAN - 1) / SPAN * SPAN);
        sums.assign(of.size() / SPAN, 0.0);
        Floats inverse = broadcast((float)(1.0 / std::max(temperature, 1e-30)));
        double total = 0;
        for (int span = 0; span * SPAN < count; span++) {
            Doubles partial = {};
            for (int i = span * SPAN; i < (span + 1) * SPAN && i < count; i += LANES) {
                float some[LANES] = {};
                Floats likely = exponential((load_floats(logits + i, count - i) - highest) * inverse);
                store_floats(some, likely, count - i);
                store_floats(of.data() + i, load_floats(some));
                partial += __builtin_convertvector(load<Eight>(some), Doubles);
                partial += __builtin_convertvector(load<Eight>(some + 8), Doubles);
            }
            for (int lane = 0; lane < 8; lane++) sums[span] += partial[lane];
            total += sums[span];
        }
        return total;
    }

    void count_buckets(int count) {
        std::fill_n(counts, NUM_BUCKETS, 0);
        std::fill_n(masses, NUM_BUCKETS, 0.0);
        for (int id = 0; id < count; id++) {
            int bucket = bits(id) >> BUCKET_SHIFT;
            counts[bucket]++;
            masses[bucket] += of[id];
        }
    }

    // The first token stays; one behind it stays as long as fewer than `most` stand before it, and their mass is
    // less than `mass`.
    Cut cut(int count, int64_t most, double mass) {
        int64_t num_before = 0;
        double before = 0;
        for (int bucket = NUM_BUCKETS - 1; bucket >= 0; bucket--) {
            if (num_before + counts[bucket] < most && before + masses[bucket] < mass) {
                num_before += counts[bucket];
                before += masses[bucket];
                continue;
            }
            sorted.clear();
            for (int id = 0; id < count; id++)
                if ((int)(bits(id) >> BUCKET_SHIFT) == bucket) sorted.emplace_back(~bits(id), id);
            std::sort(sorted.begin(), sorted.end());
            Cut last = {~0u, -1, before};
            for (auto [inverted, id] : sorted) {
                if (num_before > 0 && (num_before >= most || last.mass >= mass)) break;
                last = {~inverted, id, last.mass + of[id]};
                num_before++;
            }
            return last;
        }
        return {0, count, before};
    }
};

static INLINE std::pair<float, int> most_likely(const float* logits, int count) {
    Floats highest = broadcast(-__builtin_inff());
    Integers unordered = {};
    int whole = count / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) {
        Floats some = load_floats(logits + i);
        unordered = unordered | (some != some);
        highest = higher(some, highest);
    }
    float most = max_of_lanes(highest);
    bool is_number = true;
    for (const PartIntegers& part : unordered.parts)
        for (int lane = 0; lane < PART_LANES; lane++) is_number &= part[lane] == 0;
    for (int i = whole; i < count; i++) {
        is_number &= logits[i] == logits[i];
        most = logits[i] > most ? logits[i] : most;
    }
    if (!is_number) return {__builtin_nanf(""), 0};
    int id = 0;
    while (id < count - 1 && logits[id] != most) id++;
    return {most, id};
}

// The first token at which the sum in id order exceeds `target`. Rounding may leave none: then the last that
// has any likelihood.
static int first_beyond(const Likelihoods& likelihoods, int count, double target) {
    double reached = 0;
    int last = 0, id = 0;
    for (size_t span = 0; span + 1 < likelihoods.sums.size() && reached + likelihoods.sums[span] <= target; span++) {
        reached += likelihoods.sums[span];
        id += SPAN;
    }
    for (; id < count; id++) {
        if (likelihoods.of[id] == 0) continue;
        last = id;
        if ((reached += likelihoods.of[id]) > target) return id;
    }
    while (likelihoods.of[last] == 0) last = last == 0 ? count - 1 : last - 1;
    return last;
}

static int drawn(const SamplingCall& it, int row, Likelihoods& likelihoods, float highest) {
    int count = it.vocab_size;
    double total = likelihoods.fill(it.logits + row * it.stride, count, highest, it.temperatures[row]);
    bool some = it.top_k[row] < count, nucleus = it.top_p[row] < 1;
    if (!some && !nucleus && it.min_p[row] <= 0) return first_beyond(likelihoods, count, it.uniforms[row] * total);

    Cut cut = {0, count, total};
    if (some || nucleus) likelihoods.count_buckets(count);
    if (some) cut = likelihoods.cut(count, it.top_k[row], __builtin_inf());
    if (nucleus) cut = likelihoods.cut(count, it.top_k[row], it.top_p[row] * cut.mass);
    likelihoods.kept.clear();
    double mass = 0, reached = 0;
    for (int id = 0; id < count; id++) {
        float own = likelihoods.of[id];
        if (own == 0 || own < it.min_p[row] || !cut.keeps(likelihoods.bits(id), id)) continue;
        likelihoods.kept.push_back(id);
        mass += own;
    }
    double target = it.uniforms[row] * mass;
    for (int id : likelihoods.kept)
        if ((reached += likelihoods.of[id]) > target) return id;
    return likelihoods.kept.back();
}

static void choose(const SamplingCall& it) {
    static thread_local Likelihoods likelihoods;
    pool().run(it.num_rows, [&](int row) {
        auto [highest, id] = most_likely(it.logits + row * it.stride, it.vocab_size);
        it.highest[row] = highest;
        bool is_finite = highest - highest == 0;
        it.token_ids[row] = is_finite && it.temperatures[row] > 0 ? drawn(it, row, likelihoods, highest) : id;
    });
}
