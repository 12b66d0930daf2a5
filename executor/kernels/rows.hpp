// What is done to one token's numbers at a time: norms, rotation, the write into the KV cache.
//
// The cache of one layer is `[block | kv head | keys, values | block_size * head_dim numbers]`; one head's numbers of
// one block lie as the products of attention read them:
//
//     keys     [ block_size / 16 | head_dim / PER_UNIT | 16 slots | PER_UNIT ]     panels of sixteen slots
//     values   [ block_size / PER_UNIT | head_dim | PER_UNIT ]                     units of neighbouring slots
//
// Where the block size is no multiple, the last panel (the last unit) is as much narrower.
#pragma once

#include <algorithm>

#include "pool.hpp"

constexpr int MOST_HEAD_DIM = 512;
constexpr int RUNS = 2;  // of a head in a block: its keys, its values

// The arrays of one step, T tokens of R sequences: all that changes from a step to the next of as many tokens.
struct StepArrays {
    const int64_t* token_ids;     // [T]
    const int64_t* positions;     // [T]
    const int64_t* slots;         // [T]
    const int32_t* block_tables;  // [R, table_stride]
    int64_t table_stride;
    const int32_t* seq_lens;      // [R]
    const int32_t* query_start;   // [R + 1]
    const int32_t* first_block;   // [R + 1]: running count of blocks of query rows, of one kv head
    int num_rows;
};

// Where a slot's numbers stand in its head's run: PER_UNIT neighbours at a time from `begin`, `step` apart, for
// keys; one at a time for values.
struct Places {
    size_t begin;
    size_t step;
};

template <class Type>
static INLINE Places key_places(int offset, int head_dim, int block_size) {
    int first = offset / LANES * LANES, width = block_size - first < LANES ? block_size - first : LANES;
    return {(size_t)first * head_dim + (size_t)(offset - first) * PER_UNIT<Type>, (size_t)width * PER_UNIT<Type>};
}

template <class Type>
static INLINE Places value_places(int offset, int head_dim, int block_size) {
    constexpr int PER = PER_UNIT<Type>;
    int first = offset / PER * PER, width = block_size - first < PER ? block_size - first : PER;
    return {(size_t)first * head_dim + offset - first, (size_t)width};
}

template <class Type>
static INLINE float root_mean_square_scale(const Type* numbers, int count, float eps) {
    Floats squares = {};
    for (int i = 0; i < count; i += LANES) {
        Floats some = load_floats(numbers + i, count - i);
        squares = squares + some * some;
    }
    return 1.0f / __builtin_sqrtf(sum_of_lanes(squares) / (float)count + eps);
}

constexpr int MOST_ROWS_PER_CHUNK = 128;

// Neighbours go together: tokens of one KV block write the same lines of the cache.
template <class Work>
static void for_rows(int num_rows, const Work& work) {
    int chunks = 2 * pool().num_threads();
    int rows = std::clamp((num_rows + chunks - 1) / chunks, 1, MOST_ROWS_PER_CHUNK);
    pool().run((num_rows + rows - 1) / rows, [&](int chunk) {
        for (int row = chunk * rows; row < num_rows && row < (chunk + 1) * rows; row++) work(row);
    });
}

struct NormCall {
    float* hidden;              // [T, size]
    int64_t hidden_stride;
    const void* update;         // [T, size] or null
    int64_t update_stride;
    const float* update_weight; // [size] or null
    const float* weight;        // [size]
    void* out;                  // [T, size]
    int64_t out_stride;
    int num_tokens, size;
    float update_eps, eps;
};

// Adds `update`, normed itself if it has a weight, and norms the sum.
template <class Type>
static void add_norm(const NormCall& it) {
    int size = it.size;
    for_rows(it.num_tokens, [&](int row) {
        float* sum = it.hidden + row * it.hidden_stride;
        if (it.update) {
            const Type* added = (const Type*)it.update + row * it.update_stride;
            float scale = it.update_weight ? root_mean_square_scale(added, size, it.update_eps) : 1.0f;
            for (int i = 0; i < size; i += LANES) {
                Floats some = load_floats(added + i, size - i);
                if (it.update_weight) some = some * scale * load_floats(it.update_weight + i, size - i);
                store_floats(sum + i, load_floats(sum + i, size - i) + some, size - i);
            }
        }
        Type* out = (Type*)it.out + row * it.out_stride;
        float scale = root_mean_square_scale(sum, size, it.eps);
        for (int i = 0; i < size; i += LANES)
            store_floats(out + i, load_floats(sum + i, size - i) * scale * load_floats(it.weight + i, size - i), size - i);
    });
}

struct RotateCall {
    const void* qkv;         // [T, (num_heads + 2 * num_kv_heads) * head_dim]
    int64_t qkv_stride;
    const StepArrays* step;
    const float* rope;       // [positions, 2, head_dim / 2]
    const float* query_norm; // [query_norm_heads * head_dim] or null
    const float* key_norm;
    void* query;             // [T, num_heads * head_dim]
    int64_t query_stride;
    void* keys;
    void* values;
    int num_tokens, num_heads, num_kv_heads, head_dim, block_size;
    float query_eps, key_eps;
    int query_norm_heads;    // of one kind, which are normed together: one, or all of them
    int key_norm_heads;
};

// The norm of heads of one kind, one after the other.
template <class Type>
struct HeadNorm {
    const float* weight;  // or null
    float eps;
    int num_heads, head_dim;
    float scale = 1.0f;

    // The weights of head `i`, which is at `head`; `scale` is the head's from now on.
    const float* of(int i, const Type* head) {
        if (!weight) return nullptr;
        int place = i % num_heads;
        if (place == 0) scale = root_mean_square_scale(head, num_heads * head_dim, eps);
        return weight + place * head_dim;
    }
};

// Rotates one head, times `scale` and the weights of its norm if it has one: element i is paired with element
// i + head_dim / 2.
template <class Type>
static INLINE void rotated(const Type* head, const float* norm, float scale, const float* angles, int head_dim, Type* out) {
    int half = head_dim / 2;
    for (int i = 0; i < half; i += LANES) {
        int count = half - i;
        Floats first = load_floats(head + i, count), second = load_floats(head + half + i, count);
        if (norm) {
            first = first * scale * load_floats(norm + i, count);
            second = second * scale * load_floats(norm + half + i, count);
        }
        Floats cosine = load_floats(angles + i, count), sine = load_floats(angles + half + i, count);
        store_floats(out + i, first * cosine - second * sine, count);
        store_floats(out + half + i, second * cosine + first * sine, count);
    }
}

template <class Type>
static void rotate_and_store(const RotateCall& it) {
    int head_dim = it.head_dim, block_size = it.block_size;
    for_rows(it.num_tokens, [&](int token) {
        size_t block = it.step->slots[token] / block_size;
        int offset = it.step->slots[token] % block_size;
        Places to_keys = key_places<Type>(offset, head_dim, block_size);
        Places to_values = value_places<Type>(offset, head_dim, block_size);
        auto run_in = [&](void* cache, int kv_head) {
            return (Type*)cache + (block * it.num_kv_heads + kv_head) * RUNS * block_size * head_dim;
        };
        // The lines to be written come from memory while the queries are turned.
        for (int i = 0; i < it.num_kv_heads; i++) {
            const Type *keys = run_in(it.keys, i) + to_keys.begin, *values = run_in(it.values, i) + to_values.begin;
            for (int n = 0; n < head_dim; n += PER_UNIT<Type>) __builtin_prefetch(keys + n / PER_UNIT<Type> * to_keys.step, 1);
            for (int n = 0; n < head_dim; n += LANES) __builtin_prefetch(values + n * to_values.step, 1);
        }
        const Type* head = (const Type*)it.qkv + token * it.qkv_stride;
        const float* angles = it.rope + it.step->positions[token] * head_dim;
        Type* query = (Type*)it.query + token * it.query_stride;
        HeadNorm<Type> query_norm{it.query_norm, it.query_eps, it.query_norm_heads, head_dim};
        for (int i = 0; i < it.num_heads; i++, head += head_dim, query += head_dim) {
            const float* weight = query_norm.of(i, head);
            rotated(head, weight, query_norm.scale, angles, head_dim, query);
        }
        HeadNorm<Type> key_norm{it.key_norm, it.key_eps, it.key_norm_heads, head_dim};
        Type turned[MOST_HEAD_DIM];
        for (int i = 0; i < it.num_kv_heads; i++, head += head_dim) {
            const float* weight = key_norm.of(i, head);
            rotated(head, weight, key_norm.scale, angles, head_dim, turned);
            Type* to = run_in(it.keys, i) + to_keys.begin;
            for (int n = 0; n < head_dim; n += PER_UNIT<Type>, to += to_keys.step) memcpy((void*)to, turned + n, 4);
        }
        for (int i = 0; i < it.num_kv_heads; i++, head += head_dim) {
            Type* to = run_in(it.values, i) + to_values.begin;
            for (int n = 0; n < head_dim; n++, to += to_values.step) *to = head[n];
        }
    });
}
