// What Python calls. One translation unit: it is built in a second or two, and everything can be inlined.
//
// Pointers are valid for the call. `is_bfloat16` says of which type the computation is.
#include "attention.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "sampling.hpp"

#ifdef __AMX_TILE__
#include <asm/prctl.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

// Starts the threads; false when the processor's tiles may not be used, without which nothing here runs.
EXPORT bool start(int num_threads) {
#ifdef __AMX_TILE__
    constexpr int TILE_DATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0) return false;
#endif
    pool().start(num_threads);
    return true;
}

EXPORT void pack_weight(const void* weight, int num_rows, int in, bool gated, void* packed, bool is_bfloat16) {
    if (is_bfloat16)
        pack((const bfloat16*)weight, num_rows, in, gated, (bfloat16*)packed);
    else
        pack((const float*)weight, num_rows, in, gated, (float*)packed);
}

EXPORT void linear_layer(const LinearCall* call, int finishing, bool is_bfloat16, bool float_out) {
    if (!is_bfloat16)
        linear<float, float>(*call, finishing);
    else if (float_out)
        linear<bfloat16, float>(*call, finishing);
    else
        linear<bfloat16, bfloat16>(*call, finishing);
}

EXPORT void embed(const void* packed, int num_units, int in, const int64_t* ids, int count, float scale, float* out,
                  int64_t out_stride, bool is_bfloat16) {
    if (is_bfloat16)
        gather_rows((const bfloat16*)packed, num_units, in, ids, count, scale, out, out_stride);
    else
        gather_rows((const float*)packed, num_units, in, ids, count, scale, out, out_stride);
}

EXPORT void norm_rows(float* hidden, int64_t hidden_stride, const void* update, int64_t update_stride, const float* update_weight,
                      float update_eps, const float* weight, float eps, void* out, int64_t out_stride, int num_rows,
                      int size, bool is_bfloat16) {
    if (is_bfloat16)
        add_norm(hidden, hidden_stride, (const bfloat16*)update, update_stride, update_weight, update_eps, weight, eps,
                 (bfloat16*)out, out_stride, num_rows, size);
    else
        add_norm(hidden, hidden_stride, (const float*)update, update_stride, update_weight, update_eps, weight, eps, (float*)out,
                 out_stride, num_rows, size);
}

EXPORT void rotate_store(const RotateCall* call, bool is_bfloat16) {
    is_bfloat16 ? rotate_and_store<bfloat16>(*call) : rotate_and_store<float>(*call);
}

EXPORT void paged_attention(const AttentionCall* call, bool is_bfloat16) {
    is_bfloat16 ? attend<bfloat16>(*call) : attend<float>(*call);
}

EXPORT void choose_tokens(const SamplingCall* call) { choose(*call); }
