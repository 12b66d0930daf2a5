// Products of a few rows with panels of sixteen columns, the one inner loop of matrix products and attention.
//
//     c[row][panel * 16 + lane] = sum over unit of a[row][unit] * b[panel][unit][lane]
//
// Every element is summed over its units in ascending order by the same instructions, however many rows and
// panels are computed together: a row's bits do not depend on its neighbours. That is why rows are never
// computed in another shape when they are few.
//
// Where the processor has an AMX unit, that computes bfloat16. It sums the units of a tile before it adds them to
// what it has, so its bits are its own: all products go one way.
#pragma once

#include <algorithm>

#include "vector.hpp"

constexpr int MOST_ROWS = 32;   // of a product
constexpr int MOST_PANELS = 2;  // of a product

// The sum may run over several *segments* of as many units each, whose panels lie anywhere (the blocks of a KV
// cache); in `a` they follow each other.
struct Operands {
    const uint32_t* a;                // rows of units, as factors
    size_t a_stride;                  // words from row to row
    const uint32_t* const* segments;  // where each segment's first panel begins
    ptrdiff_t second_panel;           // units from a segment's first panel to its second
    size_t b_stride;                  // units from one unit's sixteen lanes to the next unit's
    int num_segments;
    int segment_units;
    float* c;
    size_t c_stride;                  // floats from row to row
    bool from_memory = false;         // the panels are read for the first time, one after the other
};

#ifdef __AVX512F__
constexpr int REGISTER_ROWS = 12;  // 12 x 2 sums, two panels and one factor in 32 registers
#else
constexpr int REGISTER_ROWS = 4;  // 4 x 2 sums, two parts and their halves, one factor in 16 registers
#endif

// Parts of the panels that so many rows are multiplied with together: their sums stay in registers, and are enough
// that none waits for the one before.
template <int ROWS, int PANELS>
constexpr int PARTS_TOGETHER = PART_LANES == LANES ? PANELS : std::min(PANELS * OF_VECTOR, ROWS < 4 ? 4 : 2);

template <class Type, int ROWS, int PARTS>
static INLINE void vector_rows(const Operands& it, int row, int first_part) {
    Part sums[ROWS][PARTS] = {};
    const uint32_t* a = it.a + row * it.a_stride;
    size_t a_stride = it.a_stride, b_stride = it.b_stride, offsets[PARTS];
    for (int j = 0; j < PARTS; j++)
        offsets[j] = (first_part + j) / OF_VECTOR * it.second_panel + (first_part + j) % OF_VECTOR * PART_LANES;
    for (int segment = 0; segment < it.num_segments; segment++) {
        const uint32_t* b = it.segments[segment];
        for (const uint32_t* end = a + it.segment_units * WORDS_PER_UNIT<Type>; a < end; b += b_stride) {
            PartUnits parts[PARTS];
#pragma GCC unroll 8
            for (int j = 0; j < PARTS; j++) parts[j] = load<PartUnits>(b + offsets[j]);
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                for (int j = 0; j < PARTS; j++)
                    sums[i][j] = multiply_add<Type>(sums[i][j], a + i * a_stride, parts[j]);
            a += WORDS_PER_UNIT<Type>;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < PARTS; j++)
            store(it.c + (row + i) * it.c_stride + (first_part + j) * PART_LANES, sums[i][j]);
}

template <class Type, int ROWS, int PANELS>
static INLINE void vector_rows(const Operands& it, int row) {
    constexpr int PARTS = PARTS_TOGETHER<ROWS, PANELS>;
    for (int part = 0; part < PANELS * OF_VECTOR; part += PARTS) vector_rows<Type, ROWS, PARTS>(it, row, part);
}

template <class Type, int PANELS>
static void vector_product(const Operands& it, int num_rows) {
    int row = 0;
    for (; row + REGISTER_ROWS <= num_rows; row += REGISTER_ROWS)
        vector_rows<Type, REGISTER_ROWS, PANELS>(it, row);
#ifdef __AVX512F__
    for (; row + 4 <= num_rows; row += 4) vector_rows<Type, 4, PANELS>(it, row);
#endif
    for (; row + 2 <= num_rows; row += 2) vector_rows<Type, 2, PANELS>(it, row);
    for (; row < num_rows; row++) vector_rows<Type, 1, PANELS>(it, row);
}

#ifdef __AMX_TILE__

// Shapes of the eight tiles: sums 0 to 3, rows 4 and 5, panels 6 and 7.
struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// The shapes that this thread has set; zero is none.
static thread_local int tiles_set_for = 0;

static INLINE void set_tiles(int num_rows, int units_per_tile) {
    int wanted = num_rows * 64 + units_per_tile;
    if (tiles_set_for == wanted) return;
    TileShapes shapes;
    int upper = num_rows < 16 ? num_rows : 16, lower = num_rows > 16 ? num_rows - 16 : 1;
    for (int tile = 0; tile < 4; tile++) shapes.rows[tile] = tile < 2 ? upper : lower, shapes.bytes_per_row[tile] = 64;
    shapes.rows[4] = upper, shapes.rows[5] = lower;
    shapes.bytes_per_row[4] = shapes.bytes_per_row[5] = 4 * units_per_tile;
    shapes.rows[6] = shapes.rows[7] = units_per_tile;
    shapes.bytes_per_row[6] = shapes.bytes_per_row[7] = 64;
    _tile_loadconfig(&shapes);
    tiles_set_for = wanted;
}

// A thread gives its tiles back when it leaves the kernels: they cost at every switch to another thread.
static INLINE void release_tiles() {
    if (tiles_set_for) _tile_release(), tiles_set_for = 0;
}

// The processor reads ahead by itself, up to the end of a page of 4 KiB, huge pages or not. So while a page is read,
// a step of a KiB each time, the first lines of the next one are asked for.
static INLINE void ask_for_next_page(const uint32_t* at) {
    uintptr_t address = (uintptr_t)at, page = 4096, next = (address & -page) + page;
    __builtin_prefetch((const char*)(next + address % page / 1024 * 64));
}

template <int PANELS, bool LOWER>  // LOWER: there are rows from the seventeenth on
static INLINE void tile_block(const Operands& it, int units_per_tile) {
    size_t a_bytes = it.a_stride * 4, b_bytes = it.b_stride * 4, c_bytes = it.c_stride * 4;
    const uint32_t *upper_a = it.a, *lower_a = it.a + 16 * it.a_stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int segment = 0; segment < it.num_segments; segment++) {
        const uint32_t* b = it.segments[segment];
        for (int unit = 0; unit < it.segment_units; unit += units_per_tile) {
            _tile_loadd(6, b, b_bytes);
            _tile_loadd(4, upper_a, a_bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (it.from_memory) ask_for_next_page(b), ask_for_next_page(b + it.second_panel);
            if (PANELS > 1) {
                _tile_loadd(7, b + it.second_panel, b_bytes);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (LOWER) {
                _tile_loadd(5, lower_a, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                if (PANELS > 1) _tile_dpbf16ps(3, 5, 7);
            }
            upper_a += units_per_tile, lower_a += units_per_tile, b += units_per_tile * it.b_stride;
        }
    }
    float* lower_c = it.c + 16 * it.c_stride;
    _tile_stored(0, it.c, c_bytes);
    if (PANELS > 1) _tile_stored(1, it.c + LANES, c_bytes);
    if (LOWER) _tile_stored(2, lower_c, c_bytes);
    if (LOWER && PANELS > 1) _tile_stored(3, lower_c + LANES, c_bytes);
}

template <int PANELS>
static INLINE void tile_product(const Operands& it, int num_rows) {
    int units_per_tile = it.segment_units % 16 ? 8 : 16;  // as much as a tile holds
    set_tiles(num_rows, units_per_tile);
    if (num_rows > 16)
        tile_block<PANELS, true>(it, units_per_tile);
    else
        tile_block<PANELS, false>(it, units_per_tile);
}

#else
static INLINE void release_tiles() {}
#endif

#ifdef __AMX_TILE__
template <class Type>
constexpr bool HAS_TILES = PER_UNIT<Type> == 2;
#else
template <class Type>
constexpr bool HAS_TILES = false;
#endif

// At most MOST_ROWS rows, and segments of a multiple of eight units.
template <class Type, int PANELS>
static INLINE void product(const Operands& it, int num_rows) {
#ifdef __AMX_TILE__
    if constexpr (HAS_TILES<Type>) return tile_product<PANELS>(it, num_rows);
#endif
    vector_product<Type, PANELS>(it, num_rows);
}
