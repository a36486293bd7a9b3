/* What a tokenizer is made of: internal to runtime/text. Loaders fill it, encoders read it. */
#ifndef ML_TEXT_MODEL_H
#define ML_TEXT_MODEL_H

#include "runtime/base/memory.h"
#include "runtime/text/buffer.h"

typedef struct ml_tokenizer {
    ml_arena *arena; /* of all below */
    const char *name;
    uint64_t hash;
    int64_t vocab, bos, eos;
} ml_tokenizer;

typedef struct ml_encoder {
    const ml_tokenizer *tokenizer;
    int64_t dropped;
} ml_encoder;

#endif
