/* mlua serve under clients that ask at once, leave, and send what is no request: every answer is
 * compared with what the decoder gives for the same text alone, without a server. */
#include <dirent.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/process/serving.h"

enum { SPECS = 60, CLIENTS = 64 };

/* ---- Requests and their answers alone ---------------------------------------------------------*/

static json_t *draw_spec(uint64_t *seed, int i) {
    char prompt[90];
    int length = (int)test_range(seed, 1, i % 5 == 0 ? 60 : 20);
    for (int j = 0; j < length; j++) prompt[j] = (char)test_range(seed, ' ', '~');
    prompt[length] = 0;
    json_t *spec = json_pack("{s:s,s:i,s:i}", "prompt", prompt, "max_tokens",
                             (int)test_range(seed, 1, i % 7 ? 8 : 40), "seed", i);
    json_object_set_new(spec, "temperature",
                        json_real(i % 3 ? 0.25 * (double)test_range(seed, 1, 5) : 0));
    if (i % 4 == 0) json_object_set_new(spec, "top_k", json_integer(test_range(seed, 1, 50)));
    if (i % 6 == 1) json_object_set_new(spec, "top_p", json_real(0.5));
    if (i % 6 == 2) json_object_set_new(spec, "stop", json_pack("[s,s]", "e", "the "));
    if (i % 10 == 3) json_object_set_new(spec, "frequency_penalty", json_real(0.5));
    if (i % 10 == 4) json_object_set_new(spec, "repetition_penalty", json_real(1.25));
    return spec;
}

static json_t *load_json(process_room *room, const char *name) {
    json_t *value =
        json_load_file(ml_arena_format(room->arena, "%s/%s", room->folder, name), 0, NULL);
    REQUIRE(value != NULL);
    return value;
}

static void answer_alone(process_room *room, json_t *specs) {
    char *path = ml_arena_format(room->arena, "%s/specs.json", room->folder);
    REQUIRE(json_dump_file(specs, path, 0) == 0);
    process_run(room, 0, "", "run net.lua --from run --quiet offline=specs.json");
}

static int descriptors_of(int pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    int count = 0;
    DIR *folder = opendir(path);
    while (folder && readdir(folder)) count++;
    if (folder) closedir(folder);
    return count;
}

static int64_t resident_bytes(process_room *room, int pid) {
    char *text = test_read_file(room->arena, ml_arena_format(room->arena, "/proc/%d/status", pid));
    return text ? (int64_t)process_number(text, "VmRSS:") << 10 : 0;
}

/* ---- Answers ---------------------------------------------------------------------------------*/

static const json_t *choice_of(const json_t *answer) {
    return json_array_get(json_object_get(answer, "choices"), 0);
}

/* The events of a stream as one answer: {text, reason}; NULL where it is not whole. */
static json_t *read_stream(char *body) {
    char *text = malloc(SERVING_ANSWER);
    const char *reason = NULL;
    bool done = false;
    size_t size = 0;
    json_t *kept = NULL;
    for (char *place, *line = strtok_r(body, "\n", &place), *rest; text && line; line = rest) {
        rest = strtok_r(NULL, "\n", &place);
        if (strncmp(line, "data: ", 6) != 0 || done) break;
        if (strcmp(line, "data: [DONE]") == 0) done = true;
        if (done) continue;
        json_t *event = json_loads(line + 6, JSON_ALLOW_NUL, NULL);
        const char *piece = json_string_value(json_object_get(choice_of(event), "text"));
        size += (size_t)snprintf(text + size, SERVING_ANSWER - size, "%s", piece ? piece : "");
        if (json_is_string(json_object_get(choice_of(event), "finish_reason"))) {
            json_decref(kept);
            kept = json_incref(event);
            reason = json_string_value(json_object_get(choice_of(kept), "finish_reason"));
        }
        json_decref(event);
    }
    json_t *result =
        done && reason ? json_pack("{s:s%,s:s}", "text", text, size, "reason", reason) : NULL;
    json_decref(kept);
    free(text);
    return result;
}

static json_t *read_whole(const char *body) {
    json_t *answer = json_loads(body, JSON_ALLOW_NUL, NULL);
    const json_t *choice = choice_of(answer);
    json_t *text = json_object_get(choice, "text"),
           *reason = json_object_get(choice, "finish_reason");
    json_t *tokens = json_object_get(json_object_get(answer, "usage"), "completion_tokens");
    json_t *result = text && reason && tokens ? json_pack("{s:O,s:O,s:O}", "text", text, "reason",
                                                          reason, "tokens", tokens)
                                              : NULL;
    json_decref(answer);
    return result;
}

static bool same(const json_t *answer, const json_t *expected) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)answer, key,
                        value) if (!json_equal(value, json_object_get(expected, key))) return false;
    return answer != NULL;
}

/* ---- Many clients -----------------------------------------------------------------------------*/

typedef struct {
    int port, requests;
    uint64_t seed;
    const json_t *specs, *expected;
    char wrong[1024]; /* the first answer that is not as expected */
    int answered, dropped, malformed;
} client;

static void report(client *c, const json_t *spec, const char *answer, const json_t *expected) {
    char *asked = json_dumps(spec, 0), *wanted = json_dumps(expected, 0);
    if (!c->wrong[0])
        snprintf(c->wrong, sizeof c->wrong, "%.200s\n gives %.500s\n, alone %.200s", asked, answer,
                 wanted);
    free(asked), free(wanted);
}

static void ask(client *c, char *answer) {
    size_t i = test_random(&c->seed) % json_array_size(c->specs);
    const json_t *spec = json_array_get(c->specs, i), *expected = json_array_get(c->expected, i);
    bool stream = test_random(&c->seed) % 2, drop = test_random(&c->seed) % 10 == 0;
    bool malformed = !drop && test_random(&c->seed) % 100 == 0;
    json_t *request = json_copy((json_t *)spec), *result = NULL;
    json_object_set_new(request, "stream", json_boolean(stream));
    char *body = json_dumps(request, 0);
    if (malformed) body[test_random(&c->seed) % strlen(body)] = '\x01';
    int fd = serving_connect(c->port);
    bool sent = fd >= 0 && serving_post(fd, "/v1/completions", body), closed = false;
    if (drop) {
        usleep((useconds_t)(test_random(&c->seed) % 20000));
        c->dropped++;
    } else if (sent && (closed = serving_receive(fd, answer)) && malformed) {
        c->malformed +=
            strstr(answer, "400 Bad Request") != NULL && strstr(answer, "invalid_json") != NULL;
        if (!strstr(answer, "400 Bad Request")) report(c, request, answer, NULL);
    } else {
        char *text = closed ? serving_body(answer) : answer;
        char first[512];
        snprintf(first, sizeof first, "%s", closed ? text : "(no answer)");
        result = !closed ? NULL : stream ? read_stream(text) : read_whole(text);
        if (same(result, expected))
            c->answered++;
        else
            report(c, request, first, expected);
    }
    if (fd >= 0) close(fd);
    json_decref(request), json_decref(result);
    free(body);
}

static void *run_client(void *context) {
    client *c = context;
    char *answer = malloc(SERVING_ANSWER);
    for (int i = 0; answer && i < c->requests; i++) ask(c, answer);
    free(answer);
    return NULL;
}

/* That many requests, shared by the clients. */
static void load_server(const serving *s, const json_t *specs, const json_t *expected, int requests,
                        uint64_t seed) {
    pthread_t threads[CLIENTS];
    client *clients = calloc(CLIENTS, sizeof *clients);
    int answered = 0, dropped = 0, malformed = 0;
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] =
            (client){s->port, requests / CLIENTS, seed * CLIENTS + (uint64_t)i, specs, expected};
        REQUIRE(pthread_create(&threads[i], NULL, run_client, &clients[i]) == 0);
    }
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(threads[i], NULL);
        EXPECT(!clients[i].wrong[0], "%s", clients[i].wrong);
        answered += clients[i].answered, dropped += clients[i].dropped,
            malformed += clients[i].malformed;
    }
    EXPECT(answered + dropped + malformed == requests / CLIENTS * CLIENTS,
           "%d answered, %d dropped, %d malformed of %d", answered, dropped, malformed, requests);
    free(clients);
}

static json_t *prepare(process_room *room) {
    json_t *specs = json_array();
    uint64_t seed = 20;
    serving_train(room, "data=text");
    for (int i = 0; i < SPECS; i++) json_array_append_new(specs, draw_spec(&seed, i));
    answer_alone(room, specs);
    return specs;
}

static double metric(const serving *s, const char *name) {
    static char answer[SERVING_ANSWER];
    const char request[] = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    int fd = serving_connect(s->port);
    REQUIRE(fd >= 0 && serving_send(fd, request, sizeof request - 1) &&
            serving_receive(fd, answer));
    close(fd);
    return process_number(answer, name);
}

static void run_load(process_room *room, int rounds, int requests) {
    json_t *specs = prepare(room), *expected = load_json(room, "expected.json");
    serving s = serving_start(room, "", "--slots 16");
    load_server(&s, specs, expected, CLIENTS, 1);
    int descriptors = descriptors_of(s.pid);
    int64_t bytes = resident_bytes(room, s.pid);
    for (int i = 0; i < rounds; i++) load_server(&s, specs, expected, requests, (uint64_t)i + 2);
    for (int i = 0; i < 100 * SERVING_SECONDS && metric(&s, "mlua_texts_running ") > 0; i++)
        usleep(10000);
    CHECK(metric(&s, "\nmlua_texts_running ") == 0 && metric(&s, "\nmlua_texts_waiting ") == 0);
    CHECK(metric(&s, "mlua_requests_total{status=\"499\"} ") > 0);
    usleep(100000);
    EXPECT(descriptors_of(s.pid) <= descriptors + 8, "%d descriptors, %d before",
           descriptors_of(s.pid), descriptors);
    int64_t after = resident_bytes(room, s.pid);
    EXPECT(after < bytes + (32 << 20), "%lld KiB, before %lld", (long long)after >> 10,
           (long long)bytes >> 10);
    CHECK_EQ_INT(serving_stop(&s), 0);
    json_decref(specs), json_decref(expected);
}

PROCESS_TEST(serve_load) {
    run_load(room, 1, 2 * CLIENTS);
}

static void run_long(process_room *room) {
    run_load(room, 10, 1024);
}
TEST(long, serve_load) {
    process_in_room(run_long);
}
