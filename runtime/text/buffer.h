/* Growable lists of token ids and of bytes, on the heap.
 *
 * A zeroed one is empty. Appending returns ML_NO_MEMORY where memory is exhausted, and then leaves
 * what was there. The contents stay valid until the next call that appends. */
#ifndef ML_BUFFER_H
#define ML_BUFFER_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct {
    uint32_t *at;
    int64_t count, capacity;
} ml_ids;

typedef struct {
    char *at; /* no final 0 */
    size_t count, capacity;
} ml_bytes;

/* Room for that many more elements. */
ml_status ml_ids_reserve(ml_ids *ids, int64_t more);
ml_status ml_ids_add(ml_ids *ids, uint32_t id);
void ml_ids_free(ml_ids *ids);

ml_status ml_bytes_reserve(ml_bytes *bytes, size_t more);
ml_status ml_bytes_add(ml_bytes *bytes, const void *from, size_t count);
void ml_bytes_free(ml_bytes *bytes);

#endif
