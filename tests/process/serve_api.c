/* What mlua serve answers to single requests: those that the official openai client and
 * lm-evaluation-harness send, wrong ones, those above its limits, and what its end finishes. */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/process/serving.h"
#include "vm/serve/library.h"

/* The body of the answer, which must have this status. */
static char *exchange(const serving *s, const char *path, const char *body, int status) {
    static char answer[SERVING_ANSWER];
    char line[32], get[256];
    int fd = serving_connect(s->port);
    int size = snprintf(get, sizeof get,
                        "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
    bool sent = body ? serving_post(fd, path, body) : serving_send(fd, get, (size_t)size);
    REQUIRE(fd >= 0 && sent && serving_receive(fd, answer));
    close(fd);
    snprintf(line, sizeof line, "HTTP/1.1 %d ", status);
    EXPECT(strncmp(answer, line, strlen(line)) == 0, "not %d: %s\n%.600s", status,
           body ? body : path, answer);
    return serving_body(answer);
}

static json_t *ask(const serving *s, const char *path, const char *body) {
    char *text = exchange(s, path, body, 200);
    json_t *value = json_loads(text, JSON_ALLOW_NUL, NULL);
    EXPECT(value != NULL, "not JSON: %s", text);
    REQUIRE(value != NULL);
    return value;
}

/* "choices.0.text": what is there; NULL where nothing is. */
static json_t *at(const json_t *value, const char *path) {
    char word[64];
    for (int n; value && sscanf(path, "%63[^.]%n", word, &n) == 1; path += n + (path[n] == '.'))
        value = json_is_array(value) ? json_array_get(value, (size_t)atoi(word))
                                     : json_object_get(value, word);
    return (json_t *)value;
}

static const char *text_at(const json_t *value, const char *path) {
    const char *text = json_string_value(at(value, path));
    return text ? text : "(none)";
}

static double number_at(const json_t *value, const char *path) {
    return json_number_value(at(value, path));
}

static void refused(const serving *s, const char *body, int status, const char *word) {
    bool chat = strstr(body, "messages") != NULL;
    char *text = exchange(s, chat ? "/v1/chat/completions" : "/v1/completions", body, status);
    EXPECT(strstr(text, word) != NULL, "\"%s\" is not in %s", word, text);
    json_t *value = json_loads(text, JSON_ALLOW_NUL, NULL);
    CHECK(json_is_string(at(value, "error.message")) && json_is_string(at(value, "error.type")));
    CHECK(at(value, "error.param") && at(value, "error.code"));
    json_decref(value);
}

/* ---- Completions ------------------------------------------------------------------------------*/

/* client.completions.create(model=, prompt=, max_tokens=, temperature=) */
static void check_completion(const serving *s) {
    json_t *a = ask(s, "/v1/completions",
                    "{\"model\":\"run\",\"prompt\":\"Say\",\"max_tokens\":7,\"temperature\":0}");
    CHECK_TEXT(text_at(a, "object"), "text_completion");
    CHECK_TEXT(text_at(a, "model"), "run");
    CHECK_TEXT(text_at(a, "choices.0.finish_reason"), "length");
    CHECK(json_is_null(at(a, "choices.0.logprobs")) && json_is_integer(at(a, "created")));
    CHECK(strncmp(text_at(a, "id"), "cmpl-", 5) == 0 && strlen(text_at(a, "choices.0.text")) == 7);
    CHECK(number_at(a, "usage.prompt_tokens") == 3 &&
          number_at(a, "usage.completion_tokens") == 7 && number_at(a, "usage.total_tokens") == 10);
    json_decref(a);
    a = ask(s, "/v1/completions",
            "{\"prompt\":[\"a\",[98]],\"n\":2,\"seed\":5,\"max_tokens\":3,\"echo\":true,\"user\":"
            "\"u\",\"suffix\":null}");
    CHECK_EQ_INT((int64_t)json_array_size(at(a, "choices")), 4);
    CHECK(text_at(a, "choices.1.text")[0] == 'a' && text_at(a, "choices.2.text")[0] == 'b');
    CHECK(number_at(a, "choices.3.index") == 3 && number_at(a, "usage.completion_tokens") == 12);
    json_decref(a);
    a = ask(s, "/v1/models", NULL);
    CHECK_TEXT(text_at(a, "data.0.id"), "run");
    json_decref(a);
    a = ask(s, "/v1/models/run", NULL);
    CHECK_TEXT(text_at(a, "object"), "model");
    json_decref(a);
}

/* lm_eval --model local-completions: scores of contexts and their continuations, of several lists
 * at once. */
static void check_scores(const serving *s) {
    char body[256];
    json_t *a = ask(s, "/v1/completions",
                    "{\"prompt\":[104,105,32],\"max_tokens\":1,\"temperature\":0,\"logprobs\":1}");
    const char *next = text_at(a, "choices.0.text");
    CHECK(strlen(next) == 1);
    snprintf(body, sizeof body,
             "{\"model\":\"run\",\"prompt\":[[104,105,32,%d],[33,34]],\"temperature\":0,\"max_"
             "tokens\":%%d,\"logprobs\":1,\"seed\":1234,\"echo\":true}",
             next[0]);
    for (int more = 0; more < 2; more++) {
        char asked[256];
        snprintf(asked, sizeof asked, body, more);
        json_t *b = ask(s, "/v1/completions", asked);
        CHECK_EQ_INT((int64_t)json_array_size(at(b, "choices.0.logprobs.token_logprobs")),
                     4 + more);
        CHECK_EQ_INT((int64_t)json_array_size(at(b, "choices.1.logprobs.top_logprobs")), 2 + more);
        CHECK(json_is_null(at(b, "choices.0.logprobs.token_logprobs.0")) &&
              json_is_null(at(b, "choices.0.logprobs.top_logprobs.0")));
        CHECK_NEAR(number_at(b, "choices.0.logprobs.token_logprobs.3"),
                   number_at(a, "choices.0.logprobs.token_logprobs.0"), 1e-5);
        CHECK(json_equal(json_object_get(at(b, "choices.0.logprobs.top_logprobs.3"), next),
                         at(b, "choices.0.logprobs.token_logprobs.3"))); /* greedy */
        CHECK(number_at(b, "choices.0.logprobs.text_offset.3") == 3 &&
              number_at(b, "usage.completion_tokens") == 2 * more);
        json_decref(b);
    }
    json_decref(a);
}

static void check_errors(const serving *s) {
    refused(s, "{}", 400, "prompt is missing");
    refused(s, "{\"prompt\":[]}", 400, "prompt must be");
    refused(s, "{\"prompt\":[1,\"a\"]}", 400, "prompt has the token");
    refused(s, "{\"prompt\":[256]}", 400, "this model has 0 to 255");
    refused(s, "{\"prompt\":[1e30]}", 400, "prompt has the token");
    refused(s, "{\"prompt\":\"\"}", 400, "at least one token");
    refused(s, "{\"prompt\":\"a\",\"modell\":1}", 400, "did you mean model?");
    refused(s, "{\"prompt\":\"a\",\"model\":\"gpt-4\"}", 404, "model_not_found");
    refused(s, "{\"prompt\":\"a\",\"temperature\":-1}", 400, "temperature must be");
    refused(s, "{\"prompt\":\"a\",\"top_p\":2}", 400, "\"param\":\"top_p\"");
    refused(s, "{\"prompt\":\"a\",\"n\":1000}", 400, "n must be an integer");
    refused(s, "{\"prompt\":\"a\",\"max_tokens\":0}", 400, "0 with echo");
    refused(s, "{\"prompt\":\"a\",\"stop\":[\"\"]}", 400, "\"param\":\"stop\"");
    refused(s, "{\"prompt\":\"a\",\"stream\":\"yes\"}", 400, "true or false");
    refused(s, "{\"prompt\":\"a\",\"logit_bias\":{\"5\":1}}", 400, "not supported");
    refused(s, "{\"prompt\":\"a\",\"logprobs\":21}", 400, "from 0 to 20");
    refused(s, "{\"prompt\":\"0123456789012345678901234567890123456789012345678901234567890123\"}",
            400, "context_length_exceeded");
    refused(s, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", 400, "chat template");
    refused(s, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", 400,
            "type text");
    refused(s, "{\"messages\":[1]}", 400, "has no role");
}

/* ---- The official client ----------------------------------------------------------------------*/

/* What openai-python sends: by httpx, over one connection. */
static char *client_request(process_room *room, int port, const char *path, const char *body,
                            const char *connection) {
    return ml_arena_format(
        room->arena,
        "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept-Encoding: gzip, deflate, br, zstd\r\n"
        "Connection: %s\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 1.99.0\r\nX-Stainless-Lang: python\r\n"
        "X-Stainless-Package-Version: 1.99.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
        "X-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.12.3\r\n"
        "Authorization: Bearer none\r\nX-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\n"
        "x-stainless-read-timeout: 600\r\nContent-Length: %zu\r\n\r\n%s",
        path, port, connection, strlen(body), body);
}

/* Two requests over one connection: an answer with its length, and a stream in chunks, none of them
 * compressed, though the client would read that. */
static void check_client(const serving *s) {
    static char answer[SERVING_ANSWER];
    static const char *const body[] = {
        "{\"model\":\"run\",\"prompt\":\"Say\",\"max_tokens\":3,\"temperature\":0}",
        "{\"model\":\"run\",\"prompt\":\"Say\",\"max_tokens\":3,\"stream\":true,\"temperature\":"
        "0}"};
    int fd = serving_connect(s->port);
    REQUIRE(fd >= 0);
    for (int i = 0; i < 2; i++) {
        const char *text = client_request(s->room, s->port, "/v1/completions", body[i],
                                          i ? "close" : "keep-alive");
        CHECK(serving_send(fd, text, strlen(text)));
    }
    CHECK(serving_receive(fd, answer));
    close(fd);
    CHECK(!strstr(answer, "Content-Encoding"));
    char *second = strstr(answer + 1, "HTTP/1.1 200 ");
    REQUIRE(strncmp(answer, "HTTP/1.1 200 ", 13) == 0 && second);
    CHECK(strstr(second, "Transfer-Encoding: chunked") && strstr(second, "text/event-stream"));
    json_t *first = json_loads(serving_body(answer), JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL);
    char joined[256] = "";
    char *place, *line = strtok_r(serving_body(second), "\n", &place);
    for (; line && strcmp(line, "data: [DONE]") != 0; line = strtok_r(NULL, "\n", &place)) {
        json_t *event =
            strncmp(line, "data: ", 6) == 0 ? json_loads(line + 6, JSON_ALLOW_NUL, NULL) : NULL;
        EXPECT(event != NULL, "no event: %s", line);
        strncat(joined, text_at(event, "choices.0.text"), sizeof joined - strlen(joined) - 1);
        json_decref(event);
    }
    CHECK(line != NULL);
    CHECK_TEXT(joined, text_at(first, "choices.0.text"));
    json_decref(first);
}

/* Of a stream that a signal interrupts, all comes; what begins then is refused. */
static void check_end(serving *s) {
    static char answer[SERVING_ANSWER];
    int fd = serving_connect(s->port);
    REQUIRE(fd >= 0 && serving_post(fd, "/v1/completions",
                                    "{\"prompt\":\"a\",\"max_tokens\":60,\"stream\":true}"));
    for (int i = 0; i < 100 * SERVING_SECONDS; i++) {
        usleep(1000);
        if (process_number(exchange(s, "/metrics", NULL, 200), "\nmlua_texts_running ") > 0) break;
    }
    CHECK_EQ_INT(serving_stop(s), 0);
    CHECK(serving_receive(fd, answer) && strstr(serving_body(answer), "data: [DONE]\n\n") != NULL);
    CHECK(strstr(answer, "\"finish_reason\":\"length\"") != NULL);
    close(fd);
    CHECK(serving_connect(s->port) < 0);
}

PROCESS_TEST(serve_answers) {
    serving_train(room, "data=text");
    serving s = serving_start(room, "", "--slots 4");
    check_completion(&s);
    check_scores(&s);
    check_errors(&s);
    check_client(&s);
    check_end(&s);
}

/* ---- Encoders and decoders --------------------------------------------------------------------*/

/* T5 answers what it reads, several texts at once, as mlua generate does. */
PROCESS_TEST(serve_inputs) {
    const http_library *library;
    if (http_library_open(&library) != ML_OK) test_skip("%s", ml_error_last()->text);
    process_shell(room, 0,
                  "cp \"$ROOT\"/models/t5.lua net.lua; $MLUA run net.lua --device cpu --quiet "
                  "layers=1 embed=16 heads=2 head_dim=8 ffn=32 seq=48 batch=4 steps=12 lr=0.02 "
                  "warmup=1 --out run");
    process_write(room, "p.txt", "local <1> = <2>\nx\n");
    process_result r = process_run(room, 0, "",
                                   "generate net.lua --device cpu --from run --prompts p.txt "
                                   "--tokens 6 --temperature 1 --seed 3 --json");
    serving s = serving_start(room, "", "--slots 3 --device cpu");
    json_t *a = ask(&s, "/v1/completions",
                    "{\"prompt\":[\"local <1> = <2>\",\"x\"],\"n\":2,\"seed\":3,\"max_tokens\":6}");
    char *line = (char *)r.output;
    for (int i = 0; i < 2; i++, line = strchr(line, '\n') + 1) {
        json_t *expected = json_loads(line, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL);
        REQUIRE(expected != NULL);
        CHECK_TEXT(text_at(a, i ? "choices.2.text" : "choices.0.text"), text_at(expected, "text"));
        json_decref(expected);
    }
    CHECK(number_at(a, "usage.prompt_tokens") > 10);
    json_decref(a);
    refused(&s, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", 400, "no conversations");
    refused(&s, "{\"prompt\":\"a\",\"echo\":true}", 400, "echo is not supported");
    refused(&s, "{\"prompt\":\"a text that is longer than the forty-eight tokens of the input\"}",
            400, "this model reads at most 48 tokens");
    CHECK_EQ_INT(serving_stop(&s), 0);
}

/* ---- Chats ------------------------------------------------------------------------------------*/

static void check_chat_stream(const serving *s) {
    char *text =
        exchange(s, "/v1/chat/completions",
                 "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
                 "\"text\":\"Hi\"}]}],\"model\":\"run\",\"max_tokens\":4,\"ignore_eos\":true,"
                 "\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
                 200);
    int events = 0;
    json_t *last = NULL;
    EXPECT(strstr(text, "data: [DONE]\n\n") != NULL, "%s", text);
    for (char *place, *line = strtok_r(text, "\n", &place);
         line && strcmp(line, "data: [DONE]") != 0; line = strtok_r(NULL, "\n", &place)) {
        json_t *event =
            strncmp(line, "data: ", 6) == 0 ? json_loads(line + 6, JSON_ALLOW_NUL, NULL) : NULL;
        EXPECT(event != NULL, "no event: %s", line);
        CHECK_TEXT(text_at(event, "object"), "chat.completion.chunk");
        if (events++ == 0) CHECK_TEXT(text_at(event, "choices.0.delta.role"), "assistant");
        json_decref(last);
        last = event;
    }
    CHECK(events >= 2 && json_array_size(at(last, "choices")) == 0);
    CHECK(number_at(last, "usage.completion_tokens") == 4);
    json_decref(last);
}

#define LONG_REQUEST                                                                               \
    "{\"prompt\":\"a\",\"n\":128,\"max_tokens\":60,\"ignore_eos\":true,\"logprobs\":5}"

/* However fast it decodes: the server is stopped for longer than its limit of three seconds. */
static void check_timeout(const serving *s) {
    char answer[SERVING_ANSWER];
    int fd = serving_connect(s->port);
    REQUIRE(fd >= 0 && serving_post(fd, "/v1/completions", LONG_REQUEST));
    usleep(50000);
    kill(s->pid, SIGSTOP);
    usleep(3500000);
    kill(s->pid, SIGCONT);
    CHECK(serving_receive(fd, answer));
    close(fd);
    EXPECT(strncmp(answer, "HTTP/1.1 504 ", 13) == 0 && strstr(answer, "timeout"), "no 504: %.600s",
           answer);
}

/* The first request for log probabilities compiles kernels, on a machine that is busy for longer
 * than the server's three seconds: its answer is whatever it is. */
static void compile_first(const serving *s, const char *question) {
    char answer[SERVING_ANSWER];
    int fd = serving_connect(s->port);
    REQUIRE(fd >= 0 && serving_post(fd, "/v1/chat/completions", question));
    CHECK(serving_receive(fd, answer));
    close(fd);
}

PROCESS_TEST(serve_chats) {
    process_write_text(room);
    process_shell(room, 0,
                  "mv text a.txt; \"$MLUA\" tokenize --train 280 a.txt -o tokenizer.json --quiet");
    process_write(room, "chat_template.jinja",
                  "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if "
                  "add_generation_prompt %}<assistant>{% endif %}");
    serving_train(room, "data=text tokenizer=tokenizer.json vocab=288 steps=2");
    serving s = serving_start(room, "", "--slots 1 --queue 1 --seconds 3");
    const char *question =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\","
        "\"content\":\"Hi\"}],\"model\":\"run\",\"max_completion_tokens\":5,\"logprobs\":true,"
        "\"top_logprobs\":2,\"n\":2,\"seed\":7,\"response_format\":{\"type\":\"text\"}}";
    compile_first(&s, question);
    json_t *a = ask(&s, "/v1/chat/completions", question);
    CHECK_TEXT(text_at(a, "object"), "chat.completion");
    CHECK_TEXT(text_at(a, "choices.1.message.role"), "assistant");
    CHECK(json_is_string(at(a, "choices.1.message.content")) &&
          json_is_null(at(a, "choices.1.message.refusal")));
    CHECK_EQ_INT((int64_t)json_array_size(at(a, "choices.1.logprobs.content")), 5);
    CHECK_EQ_INT((int64_t)json_array_size(at(a, "choices.0.logprobs.content.4.top_logprobs")), 2);
    CHECK(json_is_array(at(a, "choices.0.logprobs.content.0.bytes")) &&
          number_at(a, "choices.0.logprobs.content.0.logprob") < 0);
    json_decref(a);
    check_chat_stream(&s);
    refused(&s,
            "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"type\":"
            "\"function\"}]}",
            400, "tools is not supported");
    check_timeout(&s);
    int fd = serving_connect(s.port);
    REQUIRE(fd >= 0 && serving_post(fd, "/v1/completions", LONG_REQUEST));
    usleep(50000);
    refused(&s, "{\"prompt\":\"a\"}", 429, "queue_full");
    close(fd);
    CHECK_EQ_INT(serving_stop(&s), 0);
    process_result r = process_run(room, 1, "", "serve net.lua --from run --host 0.0.0.0 --port 0");
    process_expect(&r, "--token-file FILE");
}
