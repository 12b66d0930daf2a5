// What Python calls. One translation unit: it is built in a second or two, and everything can be inlined.
//
// Pointers are valid for the call. `is_bfloat16` says of which type the computation is.
#include "attention.hpp"
#include "linear.hpp"
#include "mixture.hpp"
#include "quantized.hpp"
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

EXPORT void pack_codes(const PackingCall* call) { pack_quantized(*call); }

// One operation: which, and where its call lies.
enum Kind { EMBED = 0, NORM = 1, LINEAR = 2, ROTATE = 3, ATTEND = 4, MIX = 5 };

struct Operation {
    int kind;
    int finishing;   // of a linear one, and of a mixture's first
    int float_out;   // of a linear one: float32 whatever the computation's type
    const void* call;
};

template <class Type, class Out>
static void any_linear(const LinearCall& call, int finishing) {
    call.weight_bits ? quantized_linear<Type, Out>(call, finishing) : linear<Type, Out>(call, finishing);
}

template <class Type>
static void compute(const Operation& it) {
    switch (it.kind) {
        case EMBED: {
            const EmbedCall& call = *(const EmbedCall*)it.call;
            return call.weight_bits ? quantized_embed(call) : embed<Type>(call);
        }
        case NORM: return add_norm<Type>(*(const NormCall*)it.call);
        case ROTATE: return rotate_and_store<Type>(*(const RotateCall*)it.call);
        case ATTEND: return attend<Type>(*(const AttentionCall*)it.call);
        case MIX: return mix<Type>(*(const MixtureCall*)it.call, it.finishing);
        case LINEAR: {
            const LinearCall& call = *(const LinearCall*)it.call;
            return it.float_out ? any_linear<Type, float>(call, it.finishing) : any_linear<Type, Type>(call, it.finishing);
        }
    }
}

// One operation, or all of a model's layers.
EXPORT void compute(const Operation* operations, int count, bool is_bfloat16) {
    for (const Operation* it = operations; it < operations + count; it++)
        is_bfloat16 ? compute<bfloat16>(*it) : compute<float>(*it);
}

EXPORT void choose_tokens(const SamplingCall* call) { choose(*call); }
