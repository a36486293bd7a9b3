/* Tokenizers: bytes. */
#include <string.h>

#include "runtime/text/tokenizer.h"
#include "tests/test.h"

TEST(text, byte_tokens) {
    ml_tokenizer *t;
    ml_ids ids = {0};
    ml_bytes text = {0};
    CHECK_STATUS(ml_tokenizer_open("bytes", &t), ML_OK);
    CHECK_EQ_INT(ml_tokenizer_vocab(t), 256);
    CHECK_STATUS(ml_tokenizer_encode(t, "a\xff\n", 3, 0, &ids), ML_OK);
    CHECK_EQ_INT(ids.count, 3);
    CHECK_EQ_INT(ids.at[1], 255);
    CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &text), ML_OK);
    CHECK(text.count == 3 && memcmp(text.at, "a\xff\n", 3) == 0);
    CHECK_EQ_INT(ml_tokenizer_id(t, "a"), 'a');
    CHECK_STATUS(ml_tokenizer_decode(t, &(uint32_t){256}, 1, 0, &text), ML_INVALID);
    CHECK_TEXT(ml_error_last()->text, "id 256 is no token of bytes, which has 256");
    ml_ids_free(&ids);
    ml_bytes_free(&text);
    ml_tokenizer_close(t);
}
