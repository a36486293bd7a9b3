/* See serving.h. */
#define _GNU_SOURCE /* memmem */
#include "tests/process/serving.h"

#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vm/serve/library.h"

/* A model of bytes; with offline= it answers the requests of a file, one after the other. */
static const char script[] =
    "local m, core = require 'mlua', require 'mlua.core'\n"
    "local cfg = m.config { embed = 32, seq = 64, vocab = 256, batch = 4, steps = 20, offline = '' "
    "}\n"
    "local A = m.axes { embed = cfg.embed, heads = 2, head_dim = 16, ffn = 64, vocab = cfg.vocab, "
    "seq = "
    "cfg.seq, batch = cfg.batch }\n"
    "local Net = m.module('Net', function(self)\n"
    "  self.wte, self.norm = m.param { A.vocab, A.embed }, m.rms_norm { A.embed }\n"
    "  self.wq, self.wk, self.wv = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, "
    "A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }\n"
    "  self.wo, self.up, self.down = m.param { A.heads, A.head_dim, A.embed }, m.param { A.embed, "
    "A.ffn }, m.param { A.ffn, A.embed }\n"
    "end)\n"
    "function Net:forward(tokens)\n"
    "  local x = self.wte:gather(tokens, 'vocab')\n"
    "  local h = self.norm(x)\n"
    "  local q, k, v = h:dot(self.wq, 'embed'), h:dot(self.wk, 'embed'), h:dot(self.wv, 'embed')\n"
    "  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, 'heads', "
    "'head_dim')\n"
    "  x = x + m.gelu(self.norm(x):dot(self.up, 'embed')):dot(self.down, 'ffn')\n"
    "  return x:dot(self.wte, 'embed')\n"
    "end\n"
    "local net = Net()\n"
    "if cfg.offline == '' then\n"
    "  m.train { model = net, batch = A.batch, seq = A.seq, steps = cfg.steps, optimizer = m.adamw "
    "{ lr = 1e-2 } }\n"
    "  return\n"
    "end\n"
    "m.export(net, { seq = A.seq })\n"
    "local Decoder, Answer = require 'mlua.decode', require 'mlua.answer'\n"
    "local d, list, bytes = Decoder.new(net, { seq = A.seq, slots = 1 }), "
    "core.json(io.open(cfg.offline):read 'a', 'specs'), m.tokenizer 'bytes'\n"
    "for i, spec in ipairs(list) do\n"
    "  local ids = { spec.prompt:byte(1, -1) }\n"
    "  spec.prompt = nil\n"
    "  local s = d:open(ids, spec)\n"
    "  local a, reason = Answer.new { tokenizer = bytes, stops = Answer.stops(spec.stop), limit = "
    "spec.max_tokens }, nil\n"
    "  while not reason do\n"
    "    local r = d:step({ s })[1]\n"
    "    if r then local _; _, reason = a:add(r.id, s:full()) end\n"
    "  end\n"
    "  d:close(s)\n"
    "  list[i] = { text = a:text(), reason = reason, tokens = #a.ids }\n"
    "end\n"
    "io.open('expected.json', 'w'):write(core.to_json(list)):close()\n";

void serving_train(process_room *room, const char *settings) {
    const http_library *library;
    if (http_library_open(&library) != ML_OK) test_skip("%s", ml_error_last()->text);
    process_write(room, "net.lua", script);
    process_write_text(room);
    process_run(room, 0, "", "run net.lua --quiet --out run %s", settings);
}

static char *read_file(process_room *room, const char *name) {
    return test_read_file(room->arena, ml_arena_format(room->arena, "%s/%s", room->folder, name));
}

serving serving_start(process_room *room, const char *environment, const char *options) {
    serving s = {room};
    process_shell(room, 0,
                  "rm -f out code; (env %s timeout %d sh -c 'echo $$ > pid; exec \"$MLUA\" serve "
                  "net.lua --from run --port 0 %s' "
                  "> out 2>&1; echo $? > code) < /dev/null > /dev/null 2>&1 & true",
                  environment, PROCESS_SECONDS, options);
    const char *out = NULL;
    for (int i = 0; i < 100 * SERVING_SECONDS && !(out && strstr(out, "at once)")); i++) {
        usleep(10000);
        out = read_file(room, "out");
        char *code = read_file(room, "code");
        if (code && strchr(code, '\n')) break;
    }
    const char *at = out ? strstr(out, "127.0.0.1:") : NULL;
    EXPECT(at != NULL, "the server did not start: %s", out ? out : "");
    REQUIRE(at != NULL);
    s.port = atoi(at + strlen("127.0.0.1:"));
    s.pid = atoi(read_file(room, "pid"));
    return s;
}

/* By SIGTERM; its exit code. */
int serving_stop(serving *s) {
    REQUIRE(s->pid > 1 && kill(s->pid, SIGTERM) == 0);
    for (int i = 0; i < 100 * SERVING_SECONDS; i++) {
        char *code = read_file(s->room, "code");
        if (code && strchr(code, '\n')) return atoi(code);
        usleep(10000);
    }
    kill(s->pid, SIGKILL);
    return -1;
}

/* ---- A client: no function here raises, for they run in threads -------------------------------*/

int serving_connect(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

bool serving_send(int fd, const char *text, size_t size) {
    for (ssize_t n; size > 0; text += n, size -= (size_t)n)
        if ((n = send(fd, text, size, MSG_NOSIGNAL)) <= 0) return false;
    return true;
}

bool serving_post(int fd, const char *path, const char *body) {
    char head[256];
    int size = snprintf(
        head, sizeof head,
        "POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
        path, strlen(body));
    return serving_send(fd, head, (size_t)size) && serving_send(fd, body, strlen(body));
}

/* All that the server sends until it closes; false where it does not within the time. */
bool serving_receive(int fd, char *answer) {
    size_t size = 0;
    for (;;) {
        answer[size] = 0;
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (size + 1 >= SERVING_ANSWER || poll(&p, 1, SERVING_SECONDS * 1000) <= 0) return false;
        ssize_t n = recv(fd, answer + size, SERVING_ANSWER - size - 1, 0);
        if (n <= 0) return true;
        size += (size_t)n;
    }
}

/* Take the lengths of chunks out of a body, in place. */
static void join_chunks(char *body) {
    char *to = body, *at = body, *end = body + strlen(body);
    while (at < end) {
        size_t size = strtoul(at, &at, 16);
        if (at + 2 + size > end) break;
        memmove(to, at + 2, size);
        to += size, at += 2 + size + 2;
    }
    *to = 0;
}

char *serving_body(char *answer) {
    char *body = strstr(answer, "\r\n\r\n");
    if (!body) return answer;
    if (memmem(answer, (size_t)(body - answer), "chunked", strlen("chunked")))
        join_chunks(body + 4);
    return body + 4;
}
