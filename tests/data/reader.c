/* What is read ahead is what is read. */
#include "runtime/data/reader.h"

#include <string.h>
#include <unistd.h>

#include "tests/data/support.h"
#include "tests/test.h"

enum { TOKENS = 5000, ROWS = 6, LENGTH = 16 };

static void check_batch(const ml_corpus *corpus, ml_reader *reader, const ml_reader_plan *p,
                        int64_t batch) {
    int32_t inputs[ROWS][LENGTH], targets[ROWS][LENGTH], tokens[LENGTH + 1];
    int wrong = 0;
    memset(inputs, 0xff, sizeof inputs);
    CHECK_STATUS(ml_reader_fill(reader, batch, &(ml_batch){inputs[0], targets[0]}), ML_OK);
    for (int64_t row = 0; row < ROWS; row++) {
        bool own = row >= p->first && row < p->first + p->count;
        CHECK_STATUS(
            ml_corpus_sample(corpus, &p->range, p->skip + batch * ROWS + row, LENGTH, tokens, NULL),
            ML_OK);
        for (int i = 0; i < LENGTH; i++)
            wrong += own ? inputs[row][i] != tokens[i] || targets[row][i] != tokens[i + 1]
                         : inputs[row][i] != -1;
    }
    CHECK_EQ_INT(wrong, 0);
}

TEST(data, read_ahead) {
    static uint16_t stored[TOKENS];
    static const int64_t order[] = {0, 1, 2, 3, 3, 4, 90, 91, 7, 8, 9, 10, 9, 2, 3, 1000000, 0};
    ml_corpus *corpus = NULL;
    ml_reader *reader = NULL;
    data_room r;
    room_enter(&r);
    for (int i = 0; i < TOKENS; i++) stored[i] = (uint16_t)(i + 256);
    room_put(&r, "a.bin", "wb", stored, sizeof stored);
    CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, NULL, &corpus), ML_OK);
    ml_reader_plan plan = {.range = {.seed = 3, .to = 1},
                           .skip = 11,
                           .rows = ROWS,
                           .first = 1,
                           .count = 3,
                           .length = LENGTH};
    CHECK_STATUS(ml_reader_open(corpus, &plan, &reader), ML_OK);
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        check_batch(corpus, reader, &plan, order[i]);
    for (int64_t i = 0; i < 300; i++) check_batch(corpus, reader, &plan, i);
    ml_reader_plan other = plan;
    other.range.seed = 4;
    CHECK(ml_reader_is(reader, &plan) && !ml_reader_is(reader, &other));
    /* An error belongs to its batch, and again where it is asked for again. */
    int32_t inputs[ROWS][LENGTH], targets[ROWS][LENGTH];
    REQUIRE(truncate(r.path, 100) == 0);
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(ml_reader_fill(reader, 500, &(ml_batch){inputs[0], targets[0]}), ML_IO);
    room_put(&r, "a.bin", "wb", stored, sizeof stored);
    check_batch(corpus, reader, &plan, 500);
    ml_reader_close(reader);
    ml_corpus_close(corpus);
    room_leave(&r);
}
