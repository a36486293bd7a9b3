#include "runtime/base/sequences.h"

/* Strides double and then halve: a row has each number in one piece. */
int64_t ml_sequence_end(const int32_t *documents, int64_t from, int64_t end) {
    int64_t last = from, stride = 64;
    for (; last + stride < end && documents[last + stride] == documents[from]; stride *= 2)
        last += stride;
    for (; stride > 0; stride /= 2)
        if (last + stride < end && documents[last + stride] == documents[from]) last += stride;
    return last + 1;
}

/* Keys that the queries before the one at place `end` of a causal sequence see. */
static double keys_before(int64_t end, int64_t window) {
    const int64_t rising = window > 0 && window < end ? window : end;
    return 0.5 * (double)rising * (double)(rising + 1) + (double)(end - rising) * (double)window;
}

double ml_sequence_pairs(int64_t length) {
    return keys_before(length, 0);
}

/* Pairs of the queries [from, to) of a row, of a sequence that begins at `start`. */
static double pairs(int64_t start, int64_t length, int64_t from, int64_t to, ml_pair_mask mask) {
    if (from < start) from = start;
    if (to > start + length) to = start + length;
    if (to <= from) return 0;
    if (!mask.causal) return (double)(to - from) * (double)length;
    return keys_before(to - start, mask.window) - keys_before(from - start, mask.window);
}

double ml_sequences_share(const ml_sequence *sequence, uint32_t count, int64_t tokens,
                          int64_t ranks, ml_pair_mask mask) {
    const int64_t half = tokens / (2 * ranks);
    double most = 0;
    for (int64_t r = 0; r < ranks; r++) {
        int64_t start = 0, low = r * half, high = (2 * ranks - 1 - r) * half;
        double sum = 0;
        for (uint32_t i = 0; i < count; i++) {
            const int64_t length = sequence[i].length;
            if (ranks == 1)
                sum += pairs(0, length, 0, length, mask);
            else
                sum += pairs(start, length, low, low + half, mask) +
                       pairs(start, length, high, high + half, mask);
            start += length;
        }
        if (sum > most) most = sum;
    }
    return most * (double)ranks / pairs(0, tokens, 0, tokens, mask);
}

void ml_sequence_rows_read(ml_arena *arena, const int32_t *documents, int64_t rows, int64_t columns,
                           ml_sequence_rows *out) {
    *out = (ml_sequence_rows){.tokens = columns};
    for (int64_t row = 0; row < rows; row++) {
        const int64_t end = (row + 1) * columns;
        for (int64_t from = row * columns, at; from < end; from = at) {
            at = ml_sequence_end(documents, from, end);
            *ML_PUSH(arena, &out->sequence) = (ml_sequence){from, at - from};
        }
        *ML_PUSH(arena, &out->end) = out->sequence.count;
    }
}

double ml_sequence_rows_share(ml_sequence_rows *rows, int64_t ranks, ml_pair_mask mask) {
    enum { KNOWN = sizeof rows->known / sizeof *rows->known };
    for (int i = 0; i < rows->known_count; i++) {
        const ml_known_share *k = &rows->known[i];
        if (k->ranks == ranks && k->mask.causal == mask.causal && k->mask.window == mask.window)
            return k->share;
    }
    double sum = 0;
    uint32_t first = 0;
    for (uint32_t i = 0; i < rows->end.count; first = rows->end.at[i++])
        sum += ml_sequences_share(rows->sequence.at + first, rows->end.at[i] - first, rows->tokens,
                                  ranks, mask);
    const double share = rows->end.count ? sum / (double)rows->end.count : 0;
    if (rows->known_count < KNOWN)
        rows->known[rows->known_count++] = (ml_known_share){mask, ranks, share};
    return share;
}
