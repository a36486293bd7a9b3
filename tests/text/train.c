/* Training of byte-level BPE. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/text/tokenizer.h"
#include "runtime/text/train.h"
#include "tests/test.h"

typedef struct {
    char text[512];
} merges;

static ml_status add_merge(void *context, const char *token, size_t bytes, int64_t count) {
    merges *m = context;
    size_t at = strlen(m->text);
    snprintf(m->text + at, sizeof m->text - at, "%.*s:%lld ", (int)bytes, token, (long long)count);
    return ML_OK;
}

static void train(const char *const *texts, int count, int64_t vocab, merges *m, ml_bytes *json,
                  int64_t *made) {
    ml_words *words[2] = {0};
    for (int i = 0; i < 2; i++) REQUIRE(ml_words_open(&words[i]) == ML_OK);
    for (int i = 0; i < count; i++)
        CHECK_STATUS(ml_words_add(words[i % 2], texts[i], strlen(texts[i])), ML_OK);
    CHECK_STATUS(ml_words_merge(words[0], words[1]), ML_OK);
    m->text[0] = 0;
    CHECK_STATUS(ml_train(words[0], vocab, add_merge, m, json, made), ML_OK);
    for (int i = 0; i < 2; i++) ml_words_close(words[i]);
}

TEST(text, trained_merges) {
    /* "low" 3 times, "lower" twice, "aaaa" once and " low" 4 times: counts by hand. */
    const char *texts[] = {"low low low", "lower low", "lower", "low low", "aaaa"};
    const char *backwards[] = {"aaaa", "low low", "lower", "lower low", "low low low"};
    merges first, second;
    ml_bytes json[2] = {{0}};
    int64_t made;
    train(texts, 5, 400, &first, &json[0], &made);
    CHECK_TEXT(first.text, "lo:8 low:8  low:4 aa:3 er:2 lower:2 ");
    CHECK_EQ_INT(made, 256 + 6 + 1);
    train(backwards, 5, 400, &second, &json[1], &made);
    CHECK_TEXT(second.text, first.text);
    CHECK(json[0].count == json[1].count && memcmp(json[0].at, json[1].at, json[0].count) == 0);
    char path[64];
    snprintf(path, sizeof path, "/tmp/mlua-train-%d.json", (int)getpid());
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    fwrite(json[0].at, 1, json[0].count, file);
    fclose(file);
    ml_tokenizer *t;
    ml_ids ids = {0};
    REQUIRE(ml_tokenizer_open(path, &t) == ML_OK);
    CHECK_EQ_INT(ml_tokenizer_vocab(t), made);
    CHECK_EQ_INT(ml_tokenizer_eos(t), made - 1);
    CHECK_STATUS(ml_tokenizer_encode(t, "lower lowest<|endoftext|>", 25, 0, &ids), ML_OK);
    REQUIRE(ids.count == 6);
    CHECK_EQ_INT(ids.at[0], 261);
    CHECK_EQ_INT(ids.at[1], 258);
    CHECK_EQ_INT(ids.at[5], 262);
    ml_ids_free(&ids);
    ml_tokenizer_close(t);
    unlink(path);
    for (int i = 0; i < 2; i++) ml_bytes_free(&json[i]);
    ml_words *none;
    REQUIRE(ml_words_open(&none) == ML_OK);
    CHECK_STATUS(ml_train(none, 100, NULL, NULL, &json[0], &made), ML_INVALID);
    ml_words_close(none);
}
