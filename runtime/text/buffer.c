#include "runtime/text/buffer.h"

#include <string.h>

#include "runtime/base/memory.h"

enum { FIRST = 64 };

/* Doubles *capacity until it holds `needed` elements of `size` bytes; NULL where that fails. */
static void *grow(void *at, size_t *capacity, size_t needed, size_t size) {
    size_t more = *capacity ? *capacity : FIRST;
    while (more < needed) {
        if (more > SIZE_MAX / 4 / size) return NULL;
        more *= 2;
    }
    void *moved = ml_realloc(at, *capacity * size, more * size);
    if (moved) *capacity = more;
    return moved;
}

static ml_status exhausted(size_t count, const char *what) {
    return ml_fail(ML_NO_MEMORY, "not enough host memory for %zu %s", count, what);
}

ml_status ml_ids_reserve(ml_ids *ids, int64_t more) {
    size_t needed = (size_t)ids->count + (size_t)more, capacity = (size_t)ids->capacity;
    if (needed <= capacity) return ML_OK;
    uint32_t *moved = grow(ids->at, &capacity, needed, sizeof *ids->at);
    if (!moved) return exhausted(needed, "token ids");
    ids->at = moved;
    ids->capacity = (int64_t)capacity;
    return ML_OK;
}

ml_status ml_ids_add(ml_ids *ids, uint32_t id) {
    if (ids->count == ids->capacity) ML_TRY(ml_ids_reserve(ids, 1));
    ids->at[ids->count++] = id;
    return ML_OK;
}

void ml_ids_free(ml_ids *ids) {
    ml_free(ids->at);
    *ids = (ml_ids){0};
}

ml_status ml_bytes_reserve(ml_bytes *bytes, size_t more) {
    size_t needed = bytes->count + more;
    if (needed < more) return exhausted(SIZE_MAX, "bytes");
    if (needed <= bytes->capacity) return ML_OK;
    char *moved = grow(bytes->at, &bytes->capacity, needed, 1);
    if (!moved) return exhausted(needed, "bytes of text");
    bytes->at = moved;
    return ML_OK;
}

ml_status ml_bytes_add(ml_bytes *bytes, const void *from, size_t count) {
    ML_TRY(ml_bytes_reserve(bytes, count));
    if (count) memcpy(bytes->at + bytes->count, from, count);
    bytes->count += count;
    return ML_OK;
}

void ml_bytes_free(ml_bytes *bytes) {
    ml_free(bytes->at);
    *bytes = (ml_bytes){0};
}
