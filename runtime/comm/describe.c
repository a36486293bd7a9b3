/* What a rank waits in, as one word that other ranks read and as text for people. */
#include <stdio.h>
#include <time.h>

#include "runtime/comm/comm_internal.h"

enum { KIND_AT = 58, COMBINE_AT = 56, DTYPE_AT = 52, OTHER_AT = 46, TAG_AT = 34 };
_Static_assert(COMM_RECEIVE < 64 && ML_COMBINE_COUNT <= 4 && ML_DTYPE_COUNT <= 16,
               "what a rank is in fits one word");

/* 6 bits of kind, 2 of combine, 4 of dtype, 52 of count. */
uint64_t comm_describe(comm_kind kind, ml_combine combine, ml_dtype dtype, int64_t count) {
    return (uint64_t)kind << KIND_AT | (uint64_t)combine << COMBINE_AT |
           (uint64_t)dtype << DTYPE_AT | ((uint64_t)count & ((1ull << DTYPE_AT) - 1));
}

/* 6 bits of kind, 12 of the other rank, 12 of tag, 34 of bytes (more count as that many). */
uint64_t comm_describe_message(comm_kind kind, int other, int tag, int64_t bytes) {
    const int64_t most = (1ll << TAG_AT) - 1;
    return (uint64_t)kind << KIND_AT | ((uint64_t)other & 4095) << OTHER_AT |
           ((uint64_t)tag & 4095) << TAG_AT | (uint64_t)(bytes < most ? bytes : most);
}

int comm_described_rank(uint64_t what) {
    unsigned kind = what >> KIND_AT;
    return kind == COMM_SEND || kind == COMM_RECEIVE ? (int)(what >> OTHER_AT & 4095) : -1;
}

static void describe_message_text(uint64_t what, char *text, size_t size) {
    bool sends = what >> KIND_AT == COMM_SEND;
    snprintf(text, size, "a %s of %llu bytes %s rank %u (tag %u)", sends ? "send" : "receive",
             (unsigned long long)(what & ((1ull << TAG_AT) - 1)), sends ? "to" : "from",
             (unsigned)(what >> OTHER_AT & 4095), (unsigned)(what >> TAG_AT & 4095));
}

void comm_describe_text(uint64_t what, char *text, size_t size) {
    static const char *const names[COMM_RECEIVE + 1] = {
        [COMM_NOTHING] = "nothing",
        [COMM_BARRIER] = "a barrier",
        [COMM_WORDS] = "a comparison between ranks",
        [COMM_SHARE] = "what rank 0 shares",
        [COMM_OUTSIDE] = "work on a GPU",
    };
    static const char *const combines[] = {" (sum)", " (max)", " (min)", ""};
    unsigned kind = what >> KIND_AT, dtype = what >> DTYPE_AT & 15;
    bool collective = kind >= COMM_COLLECTIVES && kind < COMM_COLLECTIVES + ML_COLLECTIVE_KINDS;
    if (comm_described_rank(what) >= 0)
        describe_message_text(what, text, size);
    else if (!collective || dtype >= ML_DTYPE_COUNT)
        snprintf(text, size, "%s", kind <= COMM_RECEIVE && names[kind] ? names[kind] : "?");
    else
        snprintf(text, size, "%s of %llu %s%s", ml_collectives[kind - COMM_COLLECTIVES].label,
                 (unsigned long long)(what & ((1ull << DTYPE_AT) - 1)), ml_dtypes[dtype].name,
                 ml_collectives[kind - COMM_COLLECTIVES].combines ? combines[what >> COMBINE_AT & 3]
                                                                  : "");
}
