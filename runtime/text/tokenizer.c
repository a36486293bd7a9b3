#include "runtime/text/tokenizer.h"

#include <string.h>

#include "runtime/base/memory.h"
#include "runtime/text/model.h"

/* One text for each byte: those of ASCII that print are themselves. */
static char byte_token[256][1];

static void fill_byte_tokens(void) {
    for (int i = 0; i < 256; i++) byte_token[i][0] = (char)i;
}

ml_status ml_tokenizer_open(const char *path, ml_tokenizer **result) {
    *result = NULL;
    if (strcmp(path, "bytes") != 0) {
        ml_fail(ML_INVALID, "cannot open the tokenizer %s: only \"bytes\" is known", path);
        return ml_help("tokenizer=bytes");
    }
    ml_tokenizer *t = ml_alloc(sizeof *t);
    if (!t) return ml_fail(ML_NO_MEMORY, "not enough host memory to open the tokenizer %s", path);
    fill_byte_tokens();
    *t = (ml_tokenizer){.name = "bytes", .hash = ml_hash("bytes", 5, 0), .vocab = 256};
    t->bos = t->eos = -1;
    *result = t;
    return ML_OK;
}

void ml_tokenizer_close(ml_tokenizer *t) {
    if (!t) return;
    ml_arena_free(t->arena);
    ml_free(t);
}

const char *ml_tokenizer_name(const ml_tokenizer *t) {
    return t->name;
}

int64_t ml_tokenizer_vocab(const ml_tokenizer *t) {
    return t->vocab;
}

uint64_t ml_tokenizer_hash(const ml_tokenizer *t) {
    return t->hash;
}

int64_t ml_tokenizer_id(const ml_tokenizer *t, const char *token) {
    (void)t;
    return token[0] && !token[1] ? (unsigned char)token[0] : -1;
}

const char *ml_tokenizer_token(const ml_tokenizer *t, int64_t id, size_t *bytes) {
    if (id < 0 || id >= t->vocab) return NULL;
    *bytes = 1;
    return byte_token[id];
}

int64_t ml_tokenizer_bos(const ml_tokenizer *t) {
    return t->bos;
}

int64_t ml_tokenizer_eos(const ml_tokenizer *t) {
    return t->eos;
}

ml_status ml_encoder_open(const ml_tokenizer *t, ml_encoder **encoder) {
    *encoder = ml_alloc(sizeof **encoder);
    if (!*encoder) return ml_fail(ML_NO_MEMORY, "not enough host memory for an encoder");
    (*encoder)->tokenizer = t;
    return ML_OK;
}

void ml_encoder_close(ml_encoder *encoder) {
    ml_free(encoder);
}

ml_status ml_encoder_encode(ml_encoder *encoder, const char *text, size_t bytes, int flags,
                            ml_ids *ids) {
    (void)encoder, (void)flags;
    ML_TRY(ml_ids_reserve(ids, (int64_t)bytes));
    for (size_t i = 0; i < bytes; i++) ids->at[ids->count++] = (unsigned char)text[i];
    return ML_OK;
}

int64_t ml_encoder_dropped(const ml_encoder *encoder) {
    return encoder->dropped;
}

ml_status ml_tokenizer_encode(const ml_tokenizer *t, const char *text, size_t bytes, int flags,
                              ml_ids *ids) {
    ml_encoder *encoder;
    ML_TRY(ml_encoder_open(t, &encoder));
    ml_status status = ml_encoder_encode(encoder, text, bytes, flags, ids);
    ml_encoder_close(encoder);
    return status;
}

ml_status ml_tokenizer_decode(const ml_tokenizer *t, const uint32_t *ids, int64_t count, int flags,
                              ml_bytes *text) {
    (void)flags;
    for (int64_t i = 0; i < count; i++) {
        size_t bytes;
        const char *token = ml_tokenizer_token(t, ids[i], &bytes);
        if (!token)
            return ml_fail(ML_INVALID, "id %u is no token of %s, which has %lld", ids[i], t->name,
                           (long long)t->vocab);
        ML_TRY(ml_bytes_add(text, token, bytes));
    }
    return ML_OK;
}
