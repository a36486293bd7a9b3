/* The HTTP server under stdlib/serve.lua: the test is both its clients and the program behind it.
 */
#define _GNU_SOURCE /* memmem */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "tests/test.h"
#include "vm/serve/guard.h"
#include "vm/serve/http.h"
#include "vm/serve/library.h"

enum { SECONDS = 10, ANSWER = 1 << 16 };

/* It has a page, and no routes yet. */
static http_server *start_loading(const char *token) {
    const http_library *library;
    http_server *s;
    if (http_library_open(&library) != ML_OK) test_skip("%s", ml_error_last()->text);
    const http_options options = {.host = "127.0.0.1",
                                  .token = token,
                                  .most_body = 4096,
                                  .most_waiting = 1 << 16,
                                  .most_connections = 64,
                                  .idle_seconds = SECONDS};
    ML_CHECK(http_start(&options, &s));
    ML_CHECK(http_page(s, "/health", 200, "application/json", "{}", 2, true));
    return s;
}

static http_server *start(const char *token) {
    http_server *s = start_loading(token);
    ML_CHECK(http_page(s, "/v1/models", 200, "application/json", "[1]", 3, false));
    ML_CHECK(http_route(s, "POST", "/v1/completions"));
    ML_CHECK(http_route(s, "GET", "/metrics"));
    return s;
}

/* ---- A client ---------------------------------------------------------------------------------*/

static int connect_to(const http_server *s) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)http_port(s))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* False where the server has closed the connection. */
static bool send_bytes(int fd, const char *bytes, size_t size) {
    for (ssize_t n; size > 0; bytes += n, size -= (size_t)n)
        if ((n = send(fd, bytes, size, MSG_NOSIGNAL)) <= 0) return false;
    return true;
}

static void send_post(int fd, const char *headers, const char *body) {
    char text[16384];
    int size = snprintf(text, sizeof text,
                        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: "
                        "%zu\r\n\r\n%s",
                        headers, strlen(body), body);
    REQUIRE(size < (int)sizeof text && send_bytes(fd, text, (size_t)size));
}

static void send_get(int fd, const char *path, const char *headers) {
    char text[1024];
    int size =
        snprintf(text, sizeof text, "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n", path, headers);
    REQUIRE(send_bytes(fd, text, (size_t)size));
}

/* What the server sends until the text `last` is in it, or until it closes (NULL). */
static const char *receive(int fd, const char *last) {
    static char answer[ANSWER];
    size_t size = 0;
    for (;;) {
        answer[size] = 0;
        if (last && strstr(answer, last)) return answer;
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, SECONDS * 1000) <= 0 || size + 1 >= sizeof answer) return "(no answer)";
        ssize_t n = recv(fd, answer + size, sizeof answer - size - 1, 0);
        if (n <= 0) return answer;
        size += (size_t)n;
    }
}

static void expect(const char *answer, const char *text) {
    EXPECT(strstr(answer, text) != NULL, "\"%s\" is not in: %s", text, answer);
}

static http_event next_event(http_server *s) {
    http_event event = {0};
    http_wait(s, 0);
    for (int i = 0; i < 100 * SECONDS && !http_next(s, &event); i++) http_wait(s, 0.01);
    EXPECT(event.id != 0, "no event came");
    return event;
}

static int64_t accept_request(http_server *s) {
    http_event event = next_event(s);
    CHECK(!event.left && json_is_object(event.body));
    json_decref(event.body);
    return event.id;
}

static int descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder)) count++;
    if (folder) closedir(folder);
    return count;
}

/* ---- Requests ---------------------------------------------------------------------------------*/

TEST(vm, serve_loading) {
    http_server *s = start_loading(NULL);
    int fd = connect_to(s);
    send_post(fd, "Connection: close\r\n", "{}");
    const char *answer = receive(fd, NULL);
    expect(answer, "HTTP/1.1 503");
    expect(answer, "Retry-After: 1");
    expect(answer, "\"loading\"");
    close(fd);
    fd = connect_to(s);
    send_get(fd, "/health", "Connection: close\r\n");
    expect(receive(fd, NULL), "HTTP/1.1 200");
    close(fd);
    http_stop(s);
}

TEST(vm, serve_answers) {
    http_server *s = start(NULL);
    int fd = connect_to(s);
    for (int i = 0; i < 3; i++) { /* of one connection */
        send_post(fd, "", "{\"prompt\":\"a\\u0000b\",\"n\":2}");
        http_event event = next_event(s);
        CHECK_TEXT(event.path, "/v1/completions");
        CHECK_EQ_INT(json_integer_value(json_object_get(event.body, "n")), 2);
        CHECK_EQ_INT((int64_t)json_string_length(json_object_get(event.body, "prompt")), 3);
        json_decref(event.body);
        ML_CHECK(http_reply(s, event.id, 200, "application/json", "{\"answer\":1}", 12));
        ML_CHECK(http_reply(s, event.id, 200, "application/json", "again", 5)); /* nothing */
        const char *answer = receive(fd, "}");
        expect(answer, "HTTP/1.1 200 OK");
        expect(answer, "x-request-id: req-");
    }
    send_get(fd, "/metrics", "");
    http_event event = next_event(s);
    CHECK(event.body == NULL);
    ML_CHECK(http_refuse(s, event.id, 429, "too \"many\"", "n", NULL));
    const char *answer = receive(fd, "}}");
    expect(answer, "Retry-After: 1");
    expect(answer, "{\"error\":{\"message\":\"too "
                   "\\\"many\\\"\",\"type\":\"rate_limit_error\",\"param\":\"n\",\"code\":null}}");
    close(fd);
    http_stop(s);
}

TEST(vm, serve_streams) {
    http_server *s = start(NULL);
    int fd = connect_to(s);
    send_post(fd, "", "{}");
    int64_t id = accept_request(s);
    for (int i = 0; i < 3; i++) {
        ML_CHECK(http_chunk(s, id, "data: x\n\n", 9));
        const char *answer = receive(fd, "data: x\n\n");
        if (i == 0) expect(answer, "Content-Type: text/event-stream");
    }
    CHECK(http_sending(s));
    ML_CHECK(http_chunk(s, id, "data: [DONE]\n\n", 14));
    http_finish(s, id);
    expect(receive(fd, "0\r\n\r\n"), "data: [DONE]\n\n");
    ML_CHECK(http_chunk(s, id, "late", 4));
    send_get(fd, "/health", ""); /* the connection is still of use */
    expect(receive(fd, "{}"), "200 OK");
    close(fd);
    http_stop(s);
}

static void check_refusal(http_server *s, const char *request, const char *status,
                          const char *text) {
    int fd = connect_to(s);
    REQUIRE(send_bytes(fd, request, strlen(request)));
    const char *answer = receive(fd, "}}");
    expect(answer, status);
    expect(answer, text);
    close(fd);
}

TEST(vm, serve_refuses) {
    http_server *s = start(NULL);
#define POST "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
    check_refusal(s, POST "Content-Length: 4\r\n\r\n{\"a\"", "400", "not valid JSON: ");
    check_refusal(s, POST "Content-Length: 2\r\n\r\n[]", "400", "not a JSON object");
    check_refusal(s, POST "Content-Length: 13\r\n\r\n{\"a\":1,\"a\":2}", "400", "duplicate");
    check_refusal(s, POST "Content-Length: 9\r\n\r\n{\"a\":\"\xff\"}", "400", "decode byte 0xff");
    check_refusal(s, POST "\r\n", "400", "not valid JSON");
    check_refusal(s, POST "Content-Length: 4097\r\n\r\n", "413", "longer");
    check_refusal(s, POST "Origin: https://example.org\r\nContent-Length: 2\r\n\r\n{}", "403",
                  "this machine");
    check_refusal(
        s, "POST /v1/completions HTTP/1.1\r\nHost: example.org\r\nContent-Length: 2\r\n\r\n{}",
        "403", "localhost");
    check_refusal(s, "GET /v1/completions HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", "405",
                  "another method");
    check_refusal(s, "DELETE /health HTTP/1.1\r\nHost: localhost\r\n\r\n", "405", "another method");
    check_refusal(s, "GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", "404",
                  "unknown_url");
    check_refusal(s, "GET /%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", "404",
                  "unknown_url");
    char chunked[8192];
    int size =
        snprintf(chunked, sizeof chunked,
                 POST "Transfer-Encoding: chunked\r\n\r\n1800\r\n%*s\r\n0\r\n\r\n", 0x1800, "{}");
    REQUIRE(size < (int)sizeof chunked);
    check_refusal(s, chunked, "413", "longer");
#undef POST
    http_drain(s);
    http_stop(s);
}

TEST(vm, serve_takes_tokens) {
    http_server *s = start("secret");
    int fd = connect_to(s);
    send_get(fd, "/v1/models", "");
    expect(receive(fd, "}}"), "401");
    send_get(fd, "/v1/models", "Authorization: Bearer secrets\r\n");
    expect(receive(fd, "}}"), "invalid_api_key");
    send_get(fd, "/v1/models", "Authorization: Bearer secret\r\nOrigin: https://example.org\r\n");
    expect(receive(fd, "[1]"), "200 OK");
    send_get(fd, "/health", "");
    expect(receive(fd, "{}"), "200 OK");
    close(fd);
    http_stop(s);
    const http_options everywhere = {.host = "0.0.0.0", .most_connections = 4};
    CHECK_STATUS(http_start(&everywhere, &s), ML_INVALID);
    expect(ml_error_last()->help, "--token-file FILE");
    CHECK(!guard_token(NULL, "a") && !guard_token("a", "a") && !guard_token("Basic a", "a"));
    CHECK(guard_token("bearer a", "a"));
    CHECK(guard_is_local("http://localhost:3000") && guard_is_local("[::1]:80"));
    CHECK(!guard_is_local("localhost.example.org") && !guard_is_local("null") &&
          !guard_is_local(""));
    CHECK(!guard_is_local("127.0.0.1.example.org") && !guard_is_local("http://10.0.0.1"));
}

TEST(vm, serve_sees_clients_leave) {
    http_server *s = start(NULL);
    int before = descriptors();
    for (int i = 0; i < 200; i++) {
        int fd = connect_to(s);
        send_post(fd, "", "{}");
        int64_t id = accept_request(s);
        if (i % 3) ML_CHECK(http_chunk(s, id, "data: x\n\n", 9));
        if (i % 3 == 1) receive(fd, "data: x\n\n");
        close(fd);
        if (i % 5 == 0) http_finish(s, id); /* at the same time */
        if (i % 5 == 0) continue;
        http_event event = next_event(s);
        CHECK(event.left && event.id == id);
        ML_CHECK(http_chunk(s, id, "late", 4));
    }
    int fd = connect_to(s); /* one that leaves before its request is an event */
    send_post(fd, "", "{}");
    for (int i = 0; i < 100 * SECONDS && !http_sending(s); i++) usleep(10000);
    close(fd);
    for (int i = 0; i < 100 * SECONDS && http_sending(s); i++) {
        http_event event;
        http_wait(s, 0.01);
        while (http_next(s, &event)) json_decref(event.body);
    }
    CHECK(!http_sending(s));
    CHECK(descriptors() <= before + 1); /* the folder that is read */
    http_stop(s);
}

/* Whatever state its requests are in. */
TEST(vm, serve_stops) {
    http_server *s = start(NULL);
    int fds[6];
    for (int i = 0; i < 6; i++) {
        fds[i] = connect_to(s);
        if (i == 5) send_bytes(fds[i], "POST /v1/comp", 13);
        if (i == 5) continue;
        send_post(fds[i], "", "{}");
        if (i == 4) continue; /* its event is not asked for */
        int64_t id = accept_request(s);
        if (i > 0) ML_CHECK(http_chunk(s, id, "data: x\n\n", 9));
        if (i == 2) http_finish(s, id);
        if (i == 3) receive(fds[i], "data: x\n\n");
    }
    http_drain(s);
    send_post(fds[2], "", "{}");
    expect(receive(fds[2], "shutting_down"), "503");
    http_stop(s);
    for (int i = 0; i < 6; i++) close(fds[i]);
    test_checked();
}

/* ---- Requests that no client sends ------------------------------------------------------------*/

static size_t mutate(uint64_t *seed, char *text, size_t size, size_t room) {
    for (uint64_t i = 1 + test_random(seed) % 8; i > 0; i--) {
        size_t at = test_random(seed) % size, length = 1 + test_random(seed) % 16;
        if (at + length > size) length = size - at;
        switch (test_random(seed) % 4) {
        case 0: text[at] = (char)test_random(seed); break;
        case 1: text[at] ^= (char)(1 << test_random(seed) % 8); break;
        case 2: /* left out */
            if (size - length < 2) break;
            memmove(text + at, text + at + length, size - at - length);
            size -= length;
            break;
        default: /* twice */
            if (size + length > room) break;
            memmove(text + at + length, text + at, size - at);
            size += length;
        }
    }
    return size;
}

static void answer_all(http_server *s, uint64_t *seed) {
    http_event event;
    http_wait(s, 0.001);
    while (http_next(s, &event)) {
        json_decref(event.body);
        if (event.left) continue;
        if (test_random(seed) % 2) ML_CHECK(http_chunk(s, event.id, "data: y\n\n", 9));
        if (test_random(seed) % 2)
            http_finish(s, event.id);
        else
            ML_CHECK(http_reply(s, event.id, 200, "text/plain; version=0.0.4", "y", 1));
    }
}

static void fuzz(int rounds, uint64_t seed) {
    static const char body[] =
        "{\"prompt\":[[1,2],\"\\u00e9\\ud83d\\ude00\"],\"x\":{\"y\":[null,1e9,-0.5,true]}}";
    http_server *s = start(NULL);
    int before = descriptors();
    for (int i = 0; i < rounds; i++) {
        char text[2048];
        bool chunked = test_random(&seed) % 4 == 0;
        int size = snprintf(
            text, sizeof text,
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%s%s%zu\r\n%s%s%s\r\n\r\n",
            chunked ? "Transfer-Encoding: chunked\r\nX: " : "",
            chunked ? "" : "Content-Length: ", sizeof body - 1, chunked ? "\r\n46\r\n" : "\r\n",
            body, chunked ? "\r\n0" : "");
        size_t length = mutate(&seed, text, (size_t)size, sizeof text);
        int fd = connect_to(s);
        send_bytes(fd, text, length);
        if (test_random(&seed) % 2) shutdown(fd, SHUT_WR);
        answer_all(s, &seed);
        close(fd);
    }
    for (int i = 0; i < 100 * SECONDS && http_sending(s); i++) answer_all(s, &seed), usleep(1000);
    int fd = connect_to(s);
    send_post(fd, "", body);
    int64_t id = accept_request(s);
    ML_CHECK(http_reply(s, id, 200, "application/json", "{\"z\":1}", 7));
    expect(receive(fd, "1}"), "200 OK");
    close(fd);
    for (int i = 0; i < 100 * SECONDS && descriptors() > before; i++) usleep(10000);
    CHECK(descriptors() <= before);
    http_stop(s);
}

TEST(vm, serve_fuzz) {
    fuzz(300, 1);
}
TEST(long, serve_fuzz) {
    fuzz(100000, 2);
}
