/* Data files: what is read at which place, and files that change while they are read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/io/corpus.h"
#include "runtime/io/safetensors.h"
#include "tests/test.h"

typedef struct {
    char folder[32], path[64];
} room;

static void enter(room *r, const char *name) {
    strcpy(r->folder, "/tmp/mlua-test-XXXXXX");
    REQUIRE(mkdtemp(r->folder) != NULL);
    snprintf(r->path, sizeof r->path, "%s/%s", r->folder, name);
}

static void leave(room *r) {
    unlink(r->path);
    CHECK_EQ_INT(rmdir(r->folder), 0);
}

static void put(const room *r, const char *mode, int64_t offset, const void *bytes, size_t count) {
    FILE *file = fopen(r->path, mode);
    REQUIRE(file != NULL);
    fseek(file, offset, SEEK_SET);
    CHECK_EQ_INT((int64_t)fwrite(bytes, 1, count, file), (int64_t)count);
    CHECK_EQ_INT(fclose(file), 0);
}

/* The text of the last error with FILE in the place of its path. */
static void check_message(const room *r, const char *expected) {
    char message[512];
    const char *text = ml_error_last()->text, *at = strstr(text, r->path);
    REQUIRE(at != NULL);
    snprintf(message, sizeof message, "%.*sFILE%s", (int)(at - text), text, at + strlen(r->path));
    CHECK_TEXT(message, expected);
}

static ml_status fill(ml_corpus *corpus, int64_t first, int64_t last, int64_t length,
                      int32_t *inputs, int32_t *targets) {
    ml_corpus_range range = {.first = first, .last = last};
    return ml_corpus_fill(corpus, &range, 0, 1, length, inputs, targets);
}

/* A window that no block holds: every token is where it belongs. */
TEST(io, windows_of_a_corpus) {
    enum { TOKENS = 20001 };
    static uint16_t tokens[TOKENS];
    static int32_t inputs[TOKENS], targets[TOKENS];
    room r;
    enter(&r, "a.bin");
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)(i * 7919);
    put(&r, "wb", 0, tokens, sizeof tokens);
    ml_corpus *corpus;
    CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, &corpus), ML_OK);
    CHECK_EQ_INT(ml_corpus_tokens(corpus), TOKENS);
    CHECK_STATUS(fill(corpus, 0, TOKENS, TOKENS - 1, inputs, targets), ML_OK);
    int wrong = 0;
    for (int i = 0; i + 1 < TOKENS; i++)
        wrong += inputs[i] != tokens[i] || targets[i] != tokens[i + 1];
    CHECK_EQ_INT(wrong, 0);
    ml_corpus_close(corpus);
    leave(&r);
}

/* Of 8 GiB, which are neither read whole nor mapped, only a window is. */
TEST(io, a_sparse_corpus_of_8_gib) {
    const int64_t tokens = (int64_t)4 << 30, length = 3;
    const uint16_t last[3] = {11, 22, 33};
    struct rlimit whole;
    int32_t inputs[3], targets[3];
    room r;
    enter(&r, "sparse.bin");
    put(&r, "wb", 0, "", 0);
    REQUIRE(truncate(r.path, 2 * tokens) == 0);
    put(&r, "r+b", 2 * tokens - 6, last, 6);
    REQUIRE(getrlimit(RLIMIT_AS, &whole) == 0);
#ifndef __SANITIZE_ADDRESS__ /* which reserves terabytes */
    const struct rlimit small = {(rlim_t)4 << 30, whole.rlim_max};
    REQUIRE(setrlimit(RLIMIT_AS, &small) == 0);
#endif
    ml_corpus *corpus;
    CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, &corpus), ML_OK);
    CHECK_EQ_INT(ml_corpus_tokens(corpus), tokens);
    CHECK_STATUS(fill(corpus, tokens - 4, tokens, length, inputs, targets), ML_OK);
    CHECK(setrlimit(RLIMIT_AS, &whole) == 0);
    const int32_t expected[3] = {0, 11, 22};
    CHECK_EQ_INT(memcmp(inputs, expected, sizeof inputs), 0);
    CHECK_EQ_INT(targets[2], 33);
    ml_corpus_close(corpus);
    leave(&r);
}

TEST(io, a_corpus_that_is_shortened) {
    char text[1000];
    int32_t inputs[999], targets[999];
    room r;
    enter(&r, "book.txt");
    memset(text, 'a', sizeof text);
    put(&r, "wb", 0, text, sizeof text);
    ml_corpus *corpus;
    CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, &corpus), ML_OK);
    CHECK_STATUS(fill(corpus, 0, 1000, 999, inputs, targets), ML_OK);
    REQUIRE(truncate(r.path, 700) == 0);
    CHECK_STATUS(fill(corpus, 0, 600, 500, inputs, targets), ML_OK);
    CHECK_STATUS(fill(corpus, 0, 1000, 999, inputs, targets), ML_IO);
    check_message(&r,
                  "FILE ends before byte 700: it was 1000 bytes long when it was opened, and was "
                  "shortened since");
    /* What is appended is not seen: the range is that of the opening. */
    REQUIRE(truncate(r.path, 0) == 0);
    put(&r, "r+b", 0, text, sizeof text);
    put(&r, "ab", 0, text, sizeof text);
    CHECK_EQ_INT(ml_corpus_tokens(corpus), 1000);
    CHECK_STATUS(fill(corpus, 0, 1000, 999, inputs, targets), ML_OK);
    CHECK_EQ_INT(targets[998], 'a');
    ml_corpus_close(corpus);
    leave(&r);
}

TEST(io, a_tensor_file_that_is_shortened) {
    static const char header[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    const uint64_t length = sizeof header - 1;
    const float values[2] = {1.5f, -2}, *read = (float[2]){0};
    room r;
    enter(&r, "w.safetensors");
    put(&r, "wb", 0, &length, 8);
    put(&r, "ab", 0, header, length);
    put(&r, "ab", 0, values, 8);
    ml_safetensors *file;
    CHECK_STATUS(ml_safetensors_open(r.path, &file), ML_OK);
    CHECK_EQ_INT(file->count, 1);
    CHECK_STATUS(ml_safetensors_read(file, &file->tensor[0], (void *)read), ML_OK);
    CHECK_EQ_INT(memcmp(read, values, 8), 0);
    REQUIRE(truncate(r.path, (off_t)length + 12) == 0);
    CHECK_STATUS(ml_safetensors_read(file, &file->tensor[0], (void *)read), ML_IO);
    check_message(
        &r, "tensor \"w\": FILE ends before byte 66: it was 70 bytes long when it was opened, "
            "and was shortened since");
    ml_safetensors_close(file);
    leave(&r);
}

TEST(io, a_socket_is_refused) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    ml_corpus *corpus;
    room r;
    enter(&r, "socket");
    strcpy(address.sun_path, r.path);
    int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
    REQUIRE(descriptor >= 0 && bind(descriptor, (void *)&address, sizeof address) == 0);
    CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, &corpus), ML_IO);
    check_message(&r, "cannot read data from FILE: it is a socket");
    close(descriptor);
    leave(&r);
}
