#include "runtime/text/tokenizer.h"

#include <string.h>

#include "runtime/text/model.h"
#include "runtime/text/regex.h"

void ml_tokenizer_close(ml_tokenizer *t) {
    if (!t) return;
    for (uint32_t i = 0; i < t->codes.count; i++) regex_free(t->codes.at[i]);
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
    uint32_t id = text_find(t, &t->by_text, false, token, strlen(token));
    return id == TEXT_NO_ID ? -1 : (int64_t)id;
}

const char *ml_tokenizer_token(const ml_tokenizer *t, int64_t id, size_t *bytes) {
    if (id < 0 || id >= t->vocab || !t->tokens[id].flags) return NULL;
    *bytes = t->tokens[id].text.bytes;
    return t->tokens[id].text.at;
}

int64_t ml_tokenizer_bos(const ml_tokenizer *t) {
    return t->bos;
}

int64_t ml_tokenizer_eos(const ml_tokenizer *t) {
    return t->eos;
}
