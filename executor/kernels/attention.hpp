// Attention over the paged cache (its layout: rows.hpp). The same code for one new token and for many.
//
// A *query row* is one query head of one token. Rows that share a key-value head are computed together, up to
// 32 at a time, in three passes over tiles of sixteen positions, counted from the sequence's first:
//
//     scores  = rows x keys            product(), summed over head_dim
//     weights = softmax of the scores  for each row by itself; zero where the row may not look
//     output  = weights x values       product(), summed over positions in ascending order
//
// A tile that a row may not look into adds zeros to it, which changes no bit: so a row's result depends neither
// on the rows beside it nor on where the pass began or ended, nor on the size of the blocks. Slots behind the
// context may hold anything, NaN too: their scores are replaced and their values are not read.
#pragma once

#include <algorithm>
#include <vector>

#include "product.hpp"
#include "rows.hpp"

struct AttentionCall {
    const void* query;           // [T, num_heads * head_dim]
    int64_t query_stride;
    const void* keys;
    const void* values;
    const int32_t* block_tables; // [R, table_stride]
    int64_t table_stride;
    const int32_t* seq_lens;     // [R]
    const int32_t* query_start;  // [R + 1]
    const int32_t* first_block;  // [R + 1]: running count of blocks of query rows, of one kv head
    void* out;                   // [T, num_heads * head_dim]
    int64_t out_stride;
    int num_rows, num_heads, num_kv_heads, head_dim, block_size;
    int window;                  // tokens that a token sees, itself included
    float scale;
    float soft_cap;              // 0: none
};

constexpr int TILE = LANES;  // positions

static INLINE int padded_to_tile(int count) { return (count + TILE - 1) / TILE * TILE; }

// Room of one thread; it grows to what its longest context needs and stays.
struct Room {
    std::vector<uint32_t> query, scores, key_panels, value_tiles;
    std::vector<float> output;
    std::vector<const uint32_t*> tiles;
};

// Copies of a tile that does not lie as products read it. `count` of its positions hold context.
template <class Type>
static void copy_keys(const AttentionCall& it, const int32_t* table, int head, int first, int count, Type* to) {
    constexpr int PER = PER_UNIT<Type>;
    size_t run = (size_t)it.block_size * it.head_dim;
    for (int i = 0; i < count; i++) {
        int position = first + i, offset = position % it.block_size;
        const Type* from =
            (const Type*)it.keys + ((size_t)table[position / it.block_size] * it.num_kv_heads + head) * run;
        Places places = key_places<Type>(offset, it.head_dim, it.block_size);
        from += places.begin;
        for (int n = 0; n < it.head_dim; n += PER, from += places.step)
            memcpy((void*)(to + n * LANES + i * PER), from, 4);
    }
}

template <class Type>
static void copy_values(const AttentionCall& it, const int32_t* table, int head, int first, int count, Type* to) {
    constexpr int PER = PER_UNIT<Type>;
    size_t run = (size_t)it.block_size * it.head_dim;
    memset((void*)to, 0, sizeof(Type) * TILE * it.head_dim);
    for (int i = 0; i < count; i++) {
        int position = first + i, offset = position % it.block_size;
        const Type* from =
            (const Type*)it.values + ((size_t)table[position / it.block_size] * it.num_kv_heads + head) * run;
        Places places = value_places<Type>(offset, it.head_dim, it.block_size);
        from += places.begin;
        for (int n = 0; n < it.head_dim; n++, from += places.step)
            to[(i / PER * it.head_dim + n) * PER + i % PER] = *from;
    }
}

// Turns one row's scores of positions [first, first + count) into weights, in place; the row looks at positions
// from `begin` to `end`. Returns the sum of the weights.
template <class Type>
static INLINE float softmax(const AttentionCall& it, float* scores, int first, int count, int begin, int end) {
    const Floats nothing = broadcast(-__builtin_inff());
    int from = (begin - first) / TILE * TILE, to = padded_to_tile(end - first);
    if (it.soft_cap != 0)
        for (int i = from; i < to; i += LANES) {
            Floats capped = hyperbolic_tangent(load<Floats>(scores + i) * (it.scale / it.soft_cap));
            store(scores + i, capped * (it.soft_cap / it.scale));
        }
    // Only the first and the last tile hold positions that the row may not see.
    for (int edge : {from, to - TILE}) {
        Integers position = lane_numbers() + (first + edge);
        Floats some = load<Floats>(scores + edge);
        store(scores + edge, (position >= begin) & (position < end) ? some : nothing);
    }
    Floats highest = nothing;
    for (int i = from; i < to; i += LANES) {
        Floats some = load<Floats>(scores + i);
        highest = some > highest ? some : highest;
    }
    Floats most = broadcast(max_of_lanes(highest)), sums = {};
    Type* weights = (Type*)scores;
    for (int i = from; i < to; i += LANES) {
        Floats some = exponential((load<Floats>(scores + i) - most) * it.scale);
        sums = sums + some;
        store_floats(weights + i, some);
    }
    memset((void*)weights, 0, sizeof(Type) * from);
    memset((void*)(weights + to), 0, sizeof(Type) * (count - to));
    return sum_of_lanes(sums);
}

template <class Type, bool TILES>
static void attend_block(const AttentionCall& it, Room& room, int row, int head, int first_query) {
    constexpr int PER = PER_UNIT<Type>;
    int group = it.num_heads / it.num_kv_heads, head_dim = it.head_dim;
    int first_token = it.query_start[row], num_tokens = it.query_start[row + 1] - first_token;
    int count = std::min(MOST_ROWS, num_tokens * group - first_query);
    auto token_of = [&](int i) { return (first_query + i) / group; };
    auto head_of = [&](int i) { return head * group + (first_query + i) % group; };
    auto end_of = [&](int i) { return it.seq_lens[row] - num_tokens + token_of(i) + 1; };
    int end = end_of(count - 1), first = std::max(0, end_of(0) - it.window) / TILE * TILE;
    int num_tiles = (end - first + TILE - 1) / TILE, width = num_tiles * TILE;
    const int32_t* table = it.block_tables + row * it.table_stride;
    size_t run = (size_t)it.block_size * head_dim, row_units = head_dim / PER, tile_units = (size_t)TILE * row_units;
    bool in_place = it.block_size % TILE == 0;
    auto tile_in = [&](const void* cache, int tile) {
        int position = first + tile * TILE;
        size_t block = table[position / it.block_size];
        return (const uint32_t*)((const Type*)cache + (block * it.num_kv_heads + head) * run +
                                 (size_t)(position % it.block_size) * head_dim);
    };

    // Values are wanted when the weights are known: fetched meanwhile, as many as the cache holds.
    for (int tile = 0; in_place && tile < std::min(num_tiles, 32); tile++)
        for (size_t line = 0; line < tile_units; line += LANES)
            __builtin_prefetch(tile_in(it.values, tile) + line);

    room.query.resize(std::max(room.query.size(), count * row_units));
    for (int i = 0; i < count; i++) {
        const Type* from = (const Type*)it.query + (first_token + token_of(i)) * it.query_stride;
        memcpy(room.query.data() + i * row_units, from + head_of(i) * head_dim, row_units * 4);
    }

    room.scores.resize(std::max(room.scores.size(), (size_t)count * width));
    room.key_panels.resize(std::max(room.key_panels.size(), 2 * tile_units));
    float* scores = (float*)room.scores.data();
    auto panel_of = [&](int tile, int copy) {
        if (in_place) return tile_in(it.keys, tile);
        uint32_t* panel = room.key_panels.data() + copy * tile_units;
        copy_keys(it, table, head, first + tile * TILE, std::min(TILE, end - first - tile * TILE), (Type*)panel);
        return (const uint32_t*)panel;
    };
    Operands by_keys = {room.query.data(), row_units, nullptr, 0, LANES, 1, (int)row_units, scores, (size_t)width};
    for (int tile = 0; tile < num_tiles; tile += 2, by_keys.c += 2 * TILE) {
        const uint32_t* panel = panel_of(tile, 0);
        by_keys.segments = &panel;
        if (tile + 1 == num_tiles) {
            product<Type, 1, TILES>(by_keys, count);
        } else {
            by_keys.second_panel = panel_of(tile + 1, 1) - panel;
            product<Type, 2, TILES>(by_keys, count);
        }
    }

    float sums[MOST_ROWS];
    for (int i = 0; i < count; i++) {
        int row_end = end_of(i), row_begin = std::max(0, row_end - it.window);
        sums[i] = softmax<Type>(it, scores + (size_t)i * width, first, width, row_begin, row_end);
    }

    room.tiles.resize(std::max(room.tiles.size(), (size_t)num_tiles));
    room.value_tiles.resize(std::max(room.value_tiles.size(), tile_units * (in_place ? 1 : num_tiles)));
    for (int tile = 0; tile < num_tiles; tile++) {
        int held = std::min(TILE, end - first - tile * TILE);
        if (in_place && held == TILE) {
            room.tiles[tile] = tile_in(it.values, tile);
        } else {
            uint32_t* copy = room.value_tiles.data() + (in_place ? 0 : tile * tile_units);
            copy_values(it, table, head, first + tile * TILE, held, (Type*)copy);
            room.tiles[tile] = copy;
        }
    }
    room.output.resize(std::max(room.output.size(), (size_t)count * head_dim));
    std::vector<const uint32_t*>& tiles = room.tiles;
    Operands by_values = {(const uint32_t*)scores, (size_t)width, tiles.data(),        LANES,           (size_t)head_dim,
                          num_tiles,               TILE / PER,    room.output.data(), (size_t)head_dim};
    for (int column = 0; column < head_dim; column += 2 * LANES, by_values.c += 2 * LANES) {
        if (column + LANES == head_dim)
            product<Type, 1, TILES>(by_values, count);
        else
            product<Type, 2, TILES>(by_values, count);
        for (int tile = 0; tile < num_tiles; tile++) tiles[tile] += 2 * LANES;
    }

    for (int i = 0; i < count; i++) {
        Type* out = (Type*)it.out + (first_token + token_of(i)) * it.out_stride + head_of(i) * head_dim;
        const float* numbers = room.output.data() + i * head_dim;
        for (int n = 0; n < head_dim; n += LANES) store_floats(out + n, load<Floats>(numbers + n) / sums[i]);
    }
}

template <class Type, bool TILES>
static void attend(const AttentionCall& it) {
    static thread_local Room room;
    int num_blocks = it.first_block[it.num_rows];
    pool().run(num_blocks * it.num_kv_heads, [&](int chunk) {
        int block = chunk / it.num_kv_heads;
        int row = std::upper_bound(it.first_block, it.first_block + it.num_rows, block) - it.first_block - 1;
        int first_query = (block - it.first_block[row]) * MOST_ROWS;
        attend_block<Type, TILES>(it, room, row, chunk % it.num_kv_heads, first_query);
        release_tiles();
    });
}
