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
    const StepArrays* step;
    void* out;                   // [T, num_heads * head_dim]
    int64_t out_stride;
    int num_heads, num_kv_heads, head_dim, block_size;
    int window;                  // tokens that a token sees, itself included
    float scale;
    float soft_cap;              // 0: none
};

constexpr int TILE = LANES;  // positions
constexpr int FETCHED_TILES = 16, FETCHED_LINES = 4, TILES_AHEAD = 2;
constexpr size_t BESIDE_BYTES = 512 * 1024;  // of values that are still in the core's cache when they are read

static INLINE int padded_to_tile(int count) { return (count + TILE - 1) / TILE * TILE; }

// Room of one thread; it grows to what its longest context needs and stays.
struct Room {
    std::vector<uint32_t> query, key_panels, value_tiles;
    std::vector<float> scores, output;  // scores become weights in place
    std::vector<const uint32_t*> tiles;
};

template <class Item>
static INLINE void grow(std::vector<Item>& items, size_t count) {
    if (items.size() < count) items.resize(count);
}

// Copies of a tile that does not lie as products read it. `count` of its positions hold context.
template <class Type>
static void copy_keys(const AttentionCall& it, const int32_t* table, int head, int first, int count, Type* to) {
    constexpr int PER = PER_UNIT<Type>;
    size_t runs = (size_t)RUNS * it.block_size * it.head_dim;
    for (int i = 0; i < count; i++) {
        int position = first + i, offset = position % it.block_size;
        const Type* from =
            (const Type*)it.keys + ((size_t)table[position / it.block_size] * it.num_kv_heads + head) * runs;
        Places places = key_places<Type>(offset, it.head_dim, it.block_size);
        from += places.begin;
        for (int n = 0; n < it.head_dim; n += PER, from += places.step)
            memcpy((void*)(to + n * LANES + i * PER), from, 4);
    }
}

template <class Type>
static void copy_values(const AttentionCall& it, const int32_t* table, int head, int first, int count, Type* to) {
    constexpr int PER = PER_UNIT<Type>;
    size_t runs = (size_t)RUNS * it.block_size * it.head_dim;
    memset((void*)to, 0, sizeof(Type) * TILE * it.head_dim);
    for (int i = 0; i < count; i++) {
        int position = first + i, offset = position % it.block_size;
        const Type* from =
            (const Type*)it.values + ((size_t)table[position / it.block_size] * it.num_kv_heads + head) * runs;
        Places places = value_places<Type>(offset, it.head_dim, it.block_size);
        from += places.begin;
        for (int n = 0; n < it.head_dim; n++, from += places.step)
            to[(i / PER * it.head_dim + n) * PER + i % PER] = *from;
    }
}

// The same of a tile that does lie as products read it: what stands behind the context is left out.
template <class Type>
static void copy_held_values(const uint32_t* tile, int head_dim, int count, uint32_t* to) {
    constexpr int PER = PER_UNIT<Type>;
    const uint32_t* end = to + TILE / PER * head_dim;
    size_t whole = (size_t)(count / PER) * head_dim;
    memcpy(to, tile, whole * 4);
    to += whole, tile += whole;
    if (count % PER)
        for (int n = 0; n < head_dim; n++) *to++ = *tile++ & 0xffff;  // the first of two, which lies lowest
    memset(to, 0, (end - to) * 4);
}

// The highest of `count` numbers, a multiple of sixteen. Four at a time: a comparison waits for the one before.
static INLINE float highest_of(const float* numbers, int count) {
    Floats highest[4];
    for (Floats& each : highest) each = broadcast(-__builtin_inff());
    int i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int part = 0; part < 4; part++)
            highest[part] = higher(load_floats(numbers + i + part * LANES), highest[part]);
    for (; i < count; i += LANES) highest[0] = higher(load_floats(numbers + i), highest[0]);
    return max_of_lanes(higher(higher(highest[0], highest[1]), higher(highest[2], highest[3])));
}

// Turns one row's scores of positions [first, first + count) into weights, in place; the row looks at positions
// from `begin` to `end`. Returns the sum of the weights.
template <class Type>
static INLINE float softmax(const AttentionCall& it, float* scores, int first, int count, int begin, int end) {
    const Floats nothing = broadcast(-__builtin_inff());
    int from = (begin - first) / TILE * TILE, to = padded_to_tile(end - first);
    if (it.soft_cap != 0)
        for (int i = from; i < to; i += LANES) {
            Floats capped = hyperbolic_tangent(load_floats(scores + i) * (it.scale / it.soft_cap));
            store_floats(scores + i, capped * (it.soft_cap / it.scale));
        }
    // Only the first and the last tile hold positions that the row may not see.
    for (int edge : {from, to - TILE}) {
        Integers position = lane_numbers() + (first + edge);
        Floats some = load_floats(scores + edge);
        store_floats(scores + edge, pick((position >= begin) & (position < end), some, nothing));
    }
    float power = it.scale * LOG2_E, most = power * highest_of(scores + from, to - from);
    Floats sums = {};
    Factor<Type>* weights = (Factor<Type>*)scores;
    for (int i = from; i < to; i += LANES) {
        Floats some = power_of_two(load_floats(scores + i) * power - most);
        sums = sums + some;
        store_factors<Type>(weights + i, some);
    }
    memset((void*)weights, 0, sizeof *weights * from);
    memset((void*)(weights + to), 0, sizeof *weights * (count - to));
    return sum_of_lanes(sums);
}

// Up to 32 query rows of one sequence and key-value head. Row i is a head of a token; both are counted on from
// `first_query`, heads within tokens.
template <class Type>
struct QueryBlock {
    static constexpr int PER = PER_UNIT<Type>;

    const AttentionCall& it;
    Room& room;
    int head, group, head_dim, first_query;
    int first_token, num_tokens, count;
    int seq_len;
    const int32_t* table;
    int first, end;  // positions that any of the rows looks at; the first of a tile
    int num_tiles, width;
    int stride;  // of scores: an odd number of cache lines, lest rows want the same places in the cache
    size_t row_units, row_words, tile_units;
    bool in_place;  // tiles lie in the cache as products read them
    bool is_thin;   // few rows: there is less to compute with the cache than to wait for it

    QueryBlock(const AttentionCall& call, Room& own, int row, int kv_head, int query)
        : it(call), room(own), head(kv_head), group(call.num_heads / call.num_kv_heads), head_dim(call.head_dim),
          first_query(query) {
        first_token = it.step->query_start[row];
        num_tokens = it.step->query_start[row + 1] - first_token;
        count = std::min(MOST_ROWS, num_tokens * group - first_query);
        seq_len = it.step->seq_lens[row];
        table = it.step->block_tables + row * it.step->table_stride;
        first = begin_of(0) / TILE * TILE;
        end = end_of(count - 1);
        width = padded_to_tile(end - first);
        num_tiles = width / TILE;
        stride = (num_tiles | 1) * TILE;
        row_units = head_dim / PER;
        row_words = row_units * WORDS_PER_UNIT<Type>;
        tile_units = TILE * row_units;
        in_place = it.block_size % TILE == 0;
        is_thin = in_place && count <= MOST_ROWS / 2;
    }

    int token_of(int i) const { return first_token + (first_query + i) / group; }
    int head_of(int i) const { return head * group + (first_query + i) % group; }
    int end_of(int i) const { return seq_len - num_tokens + (first_query + i) / group + 1; }
    int begin_of(int i) const { return std::max(0, end_of(i) - it.window); }
    int held_by(int tile) const { return std::min(TILE, end - first - tile * TILE); }

    const uint32_t* tile_in(const void* cache, int tile) const { return tile_in(cache, tile, head); }
    const uint32_t* tile_in(const void* cache, int tile, int kv_head) const {
        int position = first + tile * TILE;
        size_t block = (size_t)table[position / it.block_size] * it.num_kv_heads + kv_head;
        return (const uint32_t*)((const Type*)cache + (block * RUNS * it.block_size + position % it.block_size) * head_dim);
    }

    static void fetch_lines(const uint32_t* from, size_t count) {
        for (size_t line = 0; line < count; line++) __builtin_prefetch(from + line * LANES, 0, 2);
    }

    // The beginnings of runs that will be read: from there on the processor fetches by itself.
    void fetch(const void* cache, int kv_head) const {
        if (!in_place) return;
        for (int tile = 0; tile < std::min(num_tiles, FETCHED_TILES); tile++)
            fetch_lines(tile_in(cache, tile, kv_head), FETCHED_LINES);
    }

    // While the keys of a tile are read: its values, which lie close behind them, and the beginning of keys to come.
    void fetch_beside(int tile) const {
        if (tile + TILES_AHEAD < num_tiles) fetch_lines(tile_in(it.keys, tile + TILES_AHEAD), FETCHED_LINES);
        if ((tile + 1) * tile_units * 4 <= BESIDE_BYTES) fetch_lines(tile_in(it.values, tile), tile_units / LANES);
    }

    void take_queries() {
        grow(room.query, count * row_words);
        for (int i = 0; i < count; i++) {
            const Type* from = (const Type*)it.query + token_of(i) * it.query_stride + head_of(i) * head_dim;
            copy_as_factors(from, head_dim, (Factor<Type>*)(room.query.data() + i * row_words));
        }
    }

    const uint32_t* key_panel(int tile, int copy) {
        if (in_place) return tile_in(it.keys, tile);
        uint32_t* panel = room.key_panels.data() + copy * tile_units;
        copy_keys(it, table, head, first + tile * TILE, held_by(tile), (Type*)panel);
        return panel;
    }

    void score() {
        grow(room.scores, (size_t)count * stride);
        grow(room.key_panels, 2 * tile_units);
        int together = is_thin ? 1 : 2;  // one place after the other is read faster than two at once
        for (int tile = 0; tile < num_tiles; tile += together) {
            if (is_thin) fetch_beside(tile);
            const uint32_t* panel = key_panel(tile, 0);
            bool is_pair = together == 2 && tile + 1 < num_tiles;
            Operands by_keys;
            by_keys.a = room.query.data(), by_keys.a_stride = row_words;
            by_keys.segments = &panel, by_keys.num_segments = 1, by_keys.segment_units = (int)row_units;
            by_keys.b_stride = LANES, by_keys.second_panel = is_pair ? key_panel(tile + 1, 1) - panel : 0;
            by_keys.c = room.scores.data() + tile * TILE, by_keys.c_stride = stride;
            is_pair ? product<Type, 2>(by_keys, count) : product<Type, 1>(by_keys, count);
        }
    }

    void weigh(float* sums) {
        for (int i = 0; i < count; i++)
            sums[i] = softmax<Type>(it, room.scores.data() + (size_t)i * stride, first, width, begin_of(i), end_of(i));
    }

    void find_values() {
        grow(room.tiles, num_tiles);
        grow(room.value_tiles, tile_units * (in_place ? 1 : num_tiles));
        for (int tile = 0; tile < num_tiles; tile++) {
            if (in_place && held_by(tile) == TILE) {
                room.tiles[tile] = tile_in(it.values, tile);
                continue;
            }
            uint32_t* copy = room.value_tiles.data() + (in_place ? 0 : tile * tile_units);
            if (in_place)
                copy_held_values<Type>(tile_in(it.values, tile), head_dim, held_by(tile), copy);
            else
                copy_values(it, table, head, first + tile * TILE, held_by(tile), (Type*)copy);
            room.tiles[tile] = copy;
        }
    }

    void combine() {
        grow(room.output, (size_t)count * head_dim);
        for (int column = 0; column < head_dim; column += 2 * LANES) {
            Operands by_values;
            by_values.a = (const uint32_t*)room.scores.data(), by_values.a_stride = stride;
            by_values.segments = room.tiles.data(), by_values.num_segments = num_tiles;
            by_values.segment_units = TILE / PER;
            by_values.b_stride = head_dim, by_values.second_panel = LANES;
            by_values.c = room.output.data() + column, by_values.c_stride = head_dim;
            bool is_pair = column + LANES < head_dim;
            is_pair ? product<Type, 2>(by_values, count) : product<Type, 1>(by_values, count);
            for (int tile = 0; tile < num_tiles; tile++) room.tiles[tile] += 2 * LANES;
        }
    }

    void give(const float* sums) const {
        for (int i = 0; i < count; i++) {
            Type* out = (Type*)it.out + token_of(i) * it.out_stride + head_of(i) * head_dim;
            const float* numbers = room.output.data() + i * head_dim;
            for (int n = 0; n < head_dim; n += LANES) store_floats(out + n, load_floats(numbers + n) / sums[i]);
        }
    }

    // `is_last`: this thread does not go on with the next head.
    void attend(bool is_last) {
        float sums[MOST_ROWS];
        if (!is_thin) fetch(it.values, head);
        take_queries();
        score();
        if (!is_last) fetch(it.keys, head + 1);
        weigh(sums);
        find_values();
        combine();
        give(sums);
    }
};

template <class Type>
static void attend(const AttentionCall& it) {
    static thread_local Room room;
    int num_blocks = it.step->first_block[it.step->num_rows];
    // A sequence's heads are one thread's where there are chunks enough: it knows what it will read next.
    int heads = std::clamp(num_blocks * it.num_kv_heads / (8 * pool().num_threads()), 1, it.num_kv_heads);
    while (it.num_kv_heads % heads) heads--;
    int chunks_per_block = it.num_kv_heads / heads;
    pool().run(num_blocks * chunks_per_block, [&](int chunk) {
        int block = chunk / chunks_per_block, first_head = chunk % chunks_per_block * heads;
        int row = std::upper_bound(it.step->first_block, it.step->first_block + it.step->num_rows, block) - it.step->first_block - 1;
        int first_query = (block - it.step->first_block[row]) * MOST_ROWS;
        for (int head = first_head, last = first_head + heads - 1; head <= last; head++)
            QueryBlock<Type>(it, room, row, head, first_query).attend(head == last);
        release_tiles();
    });
}
