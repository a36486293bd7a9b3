/* metrics.jsonl: a JSON object a line. Flat lines of numbers, which most are, are read without
 * building objects; all others, and all errors, are jansson's. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/memory.h"
#include "vm/show/show.h"

enum { MOST_SERIES = 256, MOST_FIELDS = 64, MOST_EVENTS = 10000 };

typedef struct {
    char name[64];
    int64_t *step;
    double *value;
    size_t count, capacity;
} series;

typedef struct {
    const char *path;
    series all[MOST_SERIES];
    int count;
    int64_t line, last_step;
    json_t *events;
} reader;

typedef struct {
    const char *key;
    size_t length;
    double value;
    enum { FIELD_NUMBER, FIELD_EVENT, FIELD_OTHER } kind;
} field;

/* ---- Series ---- */

static ml_status push(series *s, int64_t step, double value) {
    while (s->count && s->step[s->count - 1] >= step) s->count--;
    if (s->count == s->capacity) {
        size_t old = s->capacity, room = old ? 2 * old : 1024;
        int64_t *steps = ml_realloc(s->step, old * sizeof *steps, room * sizeof *steps);
        if (steps) s->step = steps;
        double *values = ml_realloc(s->value, old * sizeof *values, room * sizeof *values);
        if (values) s->value = values;
        if (!steps || !values) return ml_fail(ML_NO_MEMORY, "out of memory while reading metrics");
        s->capacity = room;
    }
    s->step[s->count] = step;
    s->value[s->count++] = value;
    return ML_OK;
}

static series *find(reader *r, const field *f) {
    for (int i = 0; i < r->count; i++)
        if (strncmp(r->all[i].name, f->key, f->length) == 0 && !r->all[i].name[f->length])
            return &r->all[i];
    if (r->count == MOST_SERIES || f->length >= sizeof r->all->name) return NULL;
    memcpy(r->all[r->count].name, f->key, f->length);
    return &r->all[r->count++];
}

static bool is(const field *f, const char *key) {
    return f->length == strlen(key) && memcmp(f->key, key, f->length) == 0;
}

/* A run that was resumed repeats the steps after its checkpoint: the later lines count. */
static void rewind_to(reader *r, int64_t step) {
    for (int i = 0; i < r->count; i++)
        while (r->all[i].count && r->all[i].step[r->all[i].count - 1] >= step) r->all[i].count--;
}

static ml_status take(reader *r, const field *fields, int count) {
    double step = NAN;
    bool evaluates = false;
    for (int i = 0; i < count; i++) {
        if (is(&fields[i], "step") && fields[i].kind == FIELD_NUMBER) step = fields[i].value;
        evaluates |= fields[i].length > 5 && memcmp(fields[i].key, "eval_", 5) == 0;
    }
    if (!(step >= 0 && step < 9e15))
        return ml_fail(ML_IO, "%s:%lld: the line has no step", r->path, (long long)r->line);
    int64_t at = (int64_t)step;
    if (!evaluates) {
        if (at <= r->last_step) rewind_to(r, at);
        r->last_step = at;
    }
    for (int i = 0; i < count; i++) {
        series *s =
            fields[i].kind == FIELD_NUMBER && !is(&fields[i], "step") ? find(r, &fields[i]) : NULL;
        if (s) ML_TRY(push(s, at, fields[i].value));
    }
    return ML_OK;
}

/* ---- Lines ---- */

static const char *skip(const char *at) {
    return at + strspn(at, " \t\r\n");
}

/* A number of JSON; NULL for anything else. */
static const char *read_number(const char *at, double *value) {
    const char *digits = at + (*at == '-'), *end = digits + strspn(digits, "0123456789");
    if (end == digits || (*digits == '0' && end > digits + 1)) return NULL;
    if (*end == '.') {
        size_t fraction = strspn(end + 1, "0123456789");
        if (!fraction) return NULL;
        end += fraction + 1;
    }
    if (*end == 'e' || *end == 'E') {
        const char *exponent = end + 1 + (end[1] == '-' || end[1] == '+');
        size_t count = strspn(exponent, "0123456789");
        if (!count) return NULL;
        end = exponent + count;
    }
    *value = strtod(at, NULL);
    return isfinite(*value) ? end : NULL;
}

static bool is_double(const field *fields, const field *f) {
    while (fields < f && (fields->length != f->length || memcmp(fields->key, f->key, f->length)))
        fields++;
    return fields < f;
}

/* The fields of a flat object of plain keys; -1 where it is another: jansson's. */
static int read_flat(const char *at, field *fields) {
    int count = 0;
    if (*(at = skip(at)) != '{') return -1;
    do {
        field *f = &fields[count++];
        if (count > MOST_FIELDS || *(at = skip(at + 1)) != '"') return -1;
        f->key = at + 1;
        f->length = strcspn(f->key, "\"\\");
        if (f->key[f->length] != '"') return -1;
        for (size_t i = 0; i < f->length; i++)
            if ((unsigned char)(f->key[i] - 32) >= 95) return -1; /* not plain ASCII */
        if (is_double(fields, f) || *(at = skip(f->key + f->length + 1)) != ':') return -1;
        at = skip(at + 1);
        f->kind = FIELD_NUMBER;
        f->value = NAN;
        if (strncmp(at, "null", 4) == 0)
            at += 4;
        else if (!(at = read_number(at, &f->value)))
            return -1;
        at = skip(at);
    } while (*at == ',');
    return *at == '}' && !*skip(at + 1) ? count : -1;
}

static ml_status take_object(reader *r, json_t *object) {
    const char *key;
    json_t *value;
    if (json_is_string(json_object_get(object, "event"))) {
        if (json_array_size(r->events) < MOST_EVENTS) json_array_append(r->events, object);
        return ML_OK;
    }
    field fields[MOST_FIELDS];
    int count = 0;
    json_object_foreach(object, key, value) {
        if (count == MOST_FIELDS) break;
        bool number = json_is_number(value) || json_is_null(value);
        fields[count++] =
            (field){key, strlen(key), json_is_null(value) ? NAN : json_number_value(value),
                    number ? FIELD_NUMBER : FIELD_OTHER};
    }
    return take(r, fields, count);
}

/* One line; *torn where it does not end and is the beginning of one. */
static ml_status read_line(reader *r, const char *line, size_t length, bool *torn) {
    field fields[MOST_FIELDS];
    bool ends = length && line[length - 1] == '\n';
    if (!*skip(line) && strlen(line) == length) return ML_OK;
    int count = strlen(line) == length ? read_flat(line, fields) : -1;
    if (count >= 0 && ends) return take(r, fields, count);
    json_error_t problem;
    json_t *object = json_loadb(line, length, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &problem);
    if (!json_is_object(object)) {
        json_decref(object);
        if (!ends) return *torn = true, ML_OK;
        return ml_fail(ML_IO, "%s:%lld: not a JSON object: %s", r->path, (long long)r->line,
                       object ? "another value" : problem.text);
    }
    ml_status status = take_object(r, object);
    json_decref(object);
    return status;
}

/* ---- What is shown ---- */

static json_t *number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

/* `count` points as a curve: one by one, or by bins of as many each. */
static json_t *curve(const series *s) {
    bool bins = s->count > SHOW_POINTS;
    size_t out = bins ? SHOW_POINTS : s->count;
    json_t *step = json_array(), *value = json_array(), *low = json_array(), *high = json_array();
    for (size_t b = 0; b < out; b++) {
        size_t begin = b * s->count / out, end = (b + 1) * s->count / out, finite = 0;
        double sum = 0, least = NAN, most = NAN;
        for (size_t i = begin; i < end; i++) {
            if (!isfinite(s->value[i])) continue;
            least = fmin(least, s->value[i]), most = fmax(most, s->value[i]);
            sum += s->value[i], finite++;
        }
        json_array_append_new(step, json_integer(s->step[begin]));
        json_array_append_new(value, number(finite ? sum / (double)finite : NAN));
        json_array_append_new(low, number(least));
        json_array_append_new(high, number(most));
    }
    json_t *result = json_pack("{soso}", "step", step, "value", value);
    if (bins) json_object_update_new(result, json_pack("{sOsO}", "low", low, "high", high));
    json_decref(low);
    json_decref(high);
    return result;
}

static const series *series_of(const reader *r, const char *name) {
    for (int i = 0; i < r->count; i++)
        if (strcmp(r->all[i].name, name) == 0 && r->all[i].count) return &r->all[i];
    return NULL;
}

static json_t *evaluation(const series *s) {
    if (!s) return json_null();
    size_t best = 0;
    for (size_t i = 1; i < s->count; i++)
        if (!(s->value[i] >= s->value[best])) best = i;
    return json_pack("{sIsosIso}", "step", (json_int_t)s->step[s->count - 1], "loss",
                     number(s->value[s->count - 1]), "lowest_step", (json_int_t)s->step[best],
                     "lowest", number(s->value[best]));
}

/* Seconds that the steps took, and the median of the last hundred. */
static void add_times(json_t *progress, const series *s) {
    double all = 0, last[101];
    size_t count = 0;
    for (size_t i = 0; s && i < s->count; i++) {
        if (!isfinite(s->value[i])) continue;
        all += s->value[i] / 1e3;
        if (i + 101 < s->count) continue;
        size_t at = count++;
        for (; at && last[at - 1] > s->value[i]; at--) last[at] = last[at - 1];
        last[at] = s->value[i];
    }
    if (!count) return;
    json_object_set_new(progress, "seconds", json_real(all));
    json_object_set_new(progress, "seconds_per_step", json_real(last[count / 2] / 1e3));
}

/* Seconds that no step computed: waiting for data, evaluating, saving. */
static void add_lost(json_t *progress, const reader *r) {
    static const char *const names[] = {"data", "eval", "save"};
    json_t *lost = json_object();
    for (int i = 0; i < 3; i++) {
        char key[16];
        double sum = 0;
        snprintf(key, sizeof key, "%s_ms", names[i]);
        const series *s = series_of(r, key);
        for (size_t k = 0; s && k < s->count; k++)
            if (isfinite(s->value[k])) sum += s->value[k] / 1e3;
        if (sum > 0) json_object_set_new(lost, names[i], json_real(sum));
    }
    json_object_set_new(progress, "lost", lost);
}

static void finish(reader *r, json_t *run) {
    json_t *curves = json_object(), *last = json_object(), *progress = json_object();
    int64_t step = -1;
    for (int i = 0; i < r->count; i++) {
        const series *s = &r->all[i];
        if (!s->count) continue;
        json_object_set_new(curves, s->name, curve(s));
        json_object_set_new(last, s->name, number(s->value[s->count - 1]));
        if (strncmp(s->name, "eval_", 5) != 0 && s->step[s->count - 1] > step)
            step = s->step[s->count - 1];
    }
    if (step >= 0) json_object_set_new(progress, "step", json_integer(step));
    const series *tokens = series_of(r, "tokens");
    if (tokens)
        json_object_set_new(progress, "tokens",
                            json_integer((json_int_t)fmax(0, tokens->value[tokens->count - 1])));
    add_times(progress, series_of(r, "step_ms"));
    add_lost(progress, r);
    json_object_set_new(run, "progress", progress);
    json_object_set_new(run, "last", last);
    json_object_set_new(run, "evaluation", evaluation(series_of(r, "eval_loss")));
    json_object_set_new(run, "series", curves);
}

ml_status show_read_metrics(const char *path, json_t *run) {
    FILE *file = fopen(path, "rb");
    if (!file) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    reader *r = ml_alloc(sizeof *r);
    ml_status status = r ? ML_OK : ml_fail(ML_NO_MEMORY, "out of memory while reading %s", path);
    char *line = NULL;
    size_t room = 0;
    bool torn = false;
    if (r) *r = (reader){.path = path, .last_step = -1, .events = json_array()};
    for (ssize_t length; status == ML_OK && (length = getline(&line, &room, file)) >= 0;) {
        r->line++;
        status = read_line(r, line, (size_t)length, &torn);
    }
    if (status == ML_OK && ferror(file)) status = ml_fail(ML_IO, "cannot read %s", path);
    if (status == ML_OK) {
        finish(r, run);
        json_object_set(run, "events", r->events);
        json_object_set_new(run, "torn", json_boolean(torn));
    }
    for (int i = 0; r && i < r->count; i++) ml_free(r->all[i].step), ml_free(r->all[i].value);
    if (r) json_decref(r->events);
    ml_free(r);
    free(line);
    fclose(file);
    return status;
}
