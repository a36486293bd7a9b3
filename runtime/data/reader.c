#include "runtime/data/reader.h"

#include <pthread.h>
#include <string.h>

#include "runtime/base/memory.h"
#include "runtime/base/pool.h"

enum { DEPTH = 4, THREADS = 4, MANY_CORES = 8 };
typedef enum { EMPTY, READING, READY } slot_state;

/* Batch b is in slot b % DEPTH. */
typedef struct {
    slot_state state;
    bool reported; /* the error: asked for again, the batch is read again */
    int64_t batch;
    ml_status status;
    ml_error error;
    int32_t *tokens;       /* [count][length + 1] */
    unsigned char *begins; /* [count][length + 2]; NULL without documents */
} slot;

struct ml_reader {
    const ml_corpus *corpus;
    ml_reader_plan plan;
    pthread_mutex_t mutex;
    pthread_cond_t wanted, read; /* there is something to read; a slot is ready */
    int64_t next;                /* batches [next, next + DEPTH) are wanted */
    bool stop;
    int threads;
    pthread_t thread[THREADS];
    slot slots[DEPTH];
};

/* The first batch that is wanted and that nothing holds; NULL: none. With the mutex. */
static slot *find_work(ml_reader *r, int64_t *batch) {
    for (int64_t b = r->next; b < r->next + DEPTH; b++) {
        slot *s = &r->slots[b % DEPTH];
        *batch = b;
        if (s->state == EMPTY || (s->state == READY && s->batch != b)) return s;
    }
    return NULL;
}

static ml_status read_batch(const ml_reader *r, const slot *s) {
    const ml_reader_plan *p = &r->plan;
    int64_t sample = p->skip + s->batch * p->rows + p->first;
    for (int64_t row = 0; row < p->count; row++)
        ML_TRY(ml_corpus_sample(r->corpus, &p->range, sample + row, p->length,
                                s->tokens + row * (p->length + 1),
                                s->begins ? s->begins + row * (p->length + 2) : NULL));
    return ML_OK;
}

static void *read_ahead(void *context) {
    ml_reader *r = context;
    pthread_mutex_lock(&r->mutex);
    while (!r->stop) {
        int64_t batch;
        slot *s = find_work(r, &batch);
        if (!s) {
            pthread_cond_wait(&r->wanted, &r->mutex);
            continue;
        }
        s->state = READING, s->batch = batch, s->reported = false;
        pthread_mutex_unlock(&r->mutex);
        s->status = read_batch(r, s);
        if (s->status != ML_OK) s->error = *ml_error_last();
        pthread_mutex_lock(&r->mutex);
        s->state = READY;
        pthread_cond_broadcast(&r->read);
        pthread_cond_signal(&r->wanted); /* who found this slot taken */
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

static void free_slots(ml_reader *r) {
    for (int i = 0; i < DEPTH; i++) {
        ml_free(r->slots[i].tokens);
        ml_free(r->slots[i].begins);
    }
    ml_free(r);
}

static bool make_slots(ml_reader *r, const ml_reader_plan *p) {
    for (int i = 0; i < DEPTH; i++) {
        slot *s = &r->slots[i];
        s->tokens = ml_alloc((size_t)(p->count * (p->length + 1)) * sizeof(int32_t) + 1);
        if (p->documents) s->begins = ml_alloc((size_t)(p->count * (p->length + 2)) + 1);
        if (!s->tokens || (p->documents && !s->begins)) return false;
    }
    return true;
}

ml_status ml_reader_open(const ml_corpus *corpus, const ml_reader_plan *plan, ml_reader **result) {
    *result = NULL;
    ML_TRY(ml_corpus_check(corpus, &plan->range, plan->length));
    ml_reader *r = *result = ml_alloc(sizeof *r);
    int wanted = ml_cpu_count() >= MANY_CORES ? THREADS : 1;
    bool whole = r && make_slots(r, plan);
    if (whole) {
        r->corpus = corpus, r->plan = *plan;
        pthread_mutex_init(&r->mutex, NULL);
        pthread_cond_init(&r->wanted, NULL);
        pthread_cond_init(&r->read, NULL);
        while (r->threads < wanted &&
               pthread_create(&r->thread[r->threads], NULL, read_ahead, r) == 0)
            r->threads++;
        if (r->threads > 0) return ML_OK;
    }
    if (r) free_slots(r);
    *result = NULL;
    return ml_fail(ML_NO_MEMORY, "not enough host memory to read %s ahead", ml_corpus_name(corpus));
}

void ml_reader_close(ml_reader *r) {
    if (!r) return;
    pthread_mutex_lock(&r->mutex);
    r->stop = true;
    pthread_cond_broadcast(&r->wanted);
    pthread_mutex_unlock(&r->mutex);
    for (int i = 0; i < r->threads; i++) pthread_join(r->thread[i], NULL);
    pthread_mutex_destroy(&r->mutex);
    pthread_cond_destroy(&r->wanted);
    pthread_cond_destroy(&r->read);
    free_slots(r);
}

bool ml_reader_is(const ml_reader *r, const ml_reader_plan *p) {
    const ml_reader_plan *own = &r->plan;
    return own->skip == p->skip && own->rows == p->rows && own->first == p->first &&
           own->count == p->count && own->length == p->length && own->range.seed == p->range.seed &&
           own->range.from == p->range.from && own->range.to == p->range.to &&
           own->range.vocab == p->range.vocab && own->documents == p->documents;
}

ml_status ml_reader_fill(ml_reader *r, int64_t batch, const ml_batch *to) {
    slot *s = &r->slots[batch % DEPTH];
    int64_t length = r->plan.length;
    pthread_mutex_lock(&r->mutex);
    r->next = batch;
    if (s->reported) s->state = EMPTY, s->reported = false;
    pthread_cond_broadcast(&r->wanted);
    while (s->state != READY || s->batch != batch) pthread_cond_wait(&r->read, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
    ml_status status = s->status; /* the slot is not taken before `next` passes the batch */
    for (int64_t row = 0; row < r->plan.count && status == ML_OK; row++)
        ml_batch_put(to, r->plan.first + row, length, s->tokens + row * (length + 1),
                     s->begins ? s->begins + row * (length + 2) : NULL);
    if (status != ML_OK) *ml_error_last() = s->error;
    pthread_mutex_lock(&r->mutex);
    if (status == ML_OK)
        r->next = batch + 1;
    else
        s->reported = true;
    pthread_cond_broadcast(&r->wanted);
    pthread_mutex_unlock(&r->mutex);
    return status;
}
