/* The traits of collectives, from collectives.def. */
#include "runtime/graph/collectives.h"

#include <assert.h>

enum { MOVED = false, COMBINED = true };

const ml_collective_info ml_collectives[ML_COLLECTIVE_KINDS] = {
#define ML_COLLECTIVE(ident, name, printed, result, combines, traits, sent, doc)                   \
    [ML_COLLECTIVE_##ident] = {#name, printed, ML_RESULT_##result, combines},
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    [ML_COLLECTIVE_SEND] = {"send", "send", ML_RESULT_SAME, MOVED},
};

ml_collective ml_collective_of(ml_op op) {
    static const ml_collective kinds[ML_OP_COUNT] = {
#define ML_COLLECTIVE(ident, ...) [ML_OP_##ident] = ML_COLLECTIVE_##ident,
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    };
    assert(ml_ops[op].op_class == ML_CLASS_COLLECTIVE);
    return kinds[op];
}

double ml_collective_sent(ml_collective kind, double bytes, double ranks) {
    switch (kind) {
#define ML_COLLECTIVE(ident, name, printed, result, combines, traits, sent, doc)                   \
    case ML_COLLECTIVE_##ident:                                                                    \
        return sent;
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    case ML_COLLECTIVE_SEND:
    case ML_COLLECTIVE_KINDS: break;
    }
    return bytes;
}
