/* What `mlua lsp` and `mlua watch` (stdlib/lsp.lua, stdlib/watch.lua) cannot do in Lua: wait for
 * messages and for a process that traces a script, whichever comes first. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/cgroup.h"
#include "runtime/base/clock.h"
#include "vm/cli/gpus.h"
#include "vm/vm.h"

enum { MOST_HEADER = 4096, PART = 1 << 16 };
static const size_t MOST_MESSAGE = (size_t)256 << 20;

typedef struct {
    char *text;
    size_t size, capacity;
} buffer;

/* One a process: it has one standard input. */
static struct {
    buffer input, output; /* of the editor; of the tracing process */
    bool input_ended;
    pid_t process; /* 0: none */
    int pipe;
    pid_t run; /* a process with this one's standard output; 0: none */
} state;

/* Read what is there; false at the end of the stream. */
static bool fill(lua_State *L, buffer *b, int file) {
    if (b->size + PART > b->capacity) {
        size_t wider = 2 * b->capacity + PART;
        char *text = ml_realloc(b->text, b->capacity, wider);
        if (!text) vm_fail(L, NULL, "not enough host memory for a message");
        b->text = text;
        b->capacity = wider;
    }
    ssize_t got = read(file, b->text + b->size, PART);
    if (got < 0) return errno == EINTR || errno == EAGAIN;
    b->size += (size_t)got;
    return got > 0;
}

static void drop(buffer *b, size_t size) {
    memmove(b->text, b->text + size, b->size - size);
    b->size -= size;
}

/* ---- Messages -------------------------------------------------------------------------------- */

/* The value of Content-Length in a header of that many bytes; -1 where there is none. */
static long long content_length(const char *header, size_t size) {
    static const char name[] = "Content-Length:";
    for (size_t at = 0; at < size; at++) {
        if (size - at < sizeof name || strncasecmp(header + at, name, sizeof name - 1) != 0)
            continue;
        return strtoll(header + at + sizeof name - 1, NULL, 10);
    }
    return -1;
}

/* Push the next whole message; false where it is not there yet. */
static bool push_message(lua_State *L) {
    buffer *b = &state.input;
    const char *end = b->size ? memmem(b->text, b->size, "\r\n\r\n", 4) : NULL;
    if (!end) {
        if (b->size > MOST_HEADER) vm_fail(L, NULL, "standard input has no Content-Length");
        return false;
    }
    size_t header = (size_t)(end - b->text);
    long long length = content_length(b->text, header);
    if (length < 0 || (size_t)length > MOST_MESSAGE)
        vm_fail(L, NULL, "standard input has no valid Content-Length");
    if (b->size < header + 4 + (size_t)length) return false;
    lua_pushlstring(L, end + 4, (size_t)length);
    drop(b, header + 4 + (size_t)length);
    return true;
}

static int lsp_send(lua_State *L) {
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    bool failed = printf("Content-Length: %zu\r\n\r\n", size) < 0 ||
                  fwrite(text, 1, size, stdout) != size || fflush(stdout) != 0;
    if (failed) vm_fail(L, NULL, "cannot write to standard output");
    return 0;
}

/* ---- The tracing process --------------------------------------------------------------------- */

static void end_process(int *status) {
    if (!state.process) return;
    while (waitpid(state.process, status, 0) < 0 && errno == EINTR) {}
    close(state.pipe);
    state.process = 0;
    state.output.size = 0;
}

static int lsp_stop(lua_State *L) {
    (void)L;
    if (state.process) kill(state.process, SIGKILL);
    end_process(NULL);
    return 0;
}

static int input_file(lua_State *L, const char *text, size_t size) {
    int file = memfd_create("mlua", MFD_CLOEXEC);
    for (size_t at = 0; file >= 0 && at < size;) {
        ssize_t sent = write(file, text + at, size - at);
        if (sent <= 0) vm_fail(L, NULL, "cannot hand over a text: %s", strerror(errno));
        at += (size_t)sent;
    }
    if (file >= 0) lseek(file, 0, SEEK_SET);
    return file;
}

/* The words at index 1, for execv: in a userdata on top of the stack. */
static char **push_words(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    int count = (int)lua_rawlen(L, 1);
    char **words = lua_newuserdatauv(L, sizeof *words * ((size_t)count + 2), 0);
    words[0] = (char *)"mlua";
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, 1, i);
        words[i] = (char *)luaL_checkstring(L, -1); /* the table holds it */
        lua_pop(L, 1);
    }
    words[count + 1] = NULL;
    return words;
}

/* start(words, input?, folder?): this program with these words. */
static int lsp_start(lua_State *L) {
    size_t size = 0;
    int ends[2];
    const char *input = luaL_optlstring(L, 2, "", &size), *folder = luaL_optstring(L, 3, NULL);
    lsp_stop(L);
    char **words = push_words(L);
    int file = input_file(L, input, size);
    if (file < 0 || pipe2(ends, O_CLOEXEC) != 0)
        vm_fail(L, NULL, "cannot start a process: %s", strerror(errno));
    pid_t process = fork();
    if (process == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(file, STDIN_FILENO);
        dup2(ends[1], STDOUT_FILENO);
        if (!folder || chdir(folder) == 0) execv("/proc/self/exe", words);
        _exit(127);
    }
    close(file);
    close(ends[1]);
    if (process < 0) {
        close(ends[0]);
        vm_fail(L, NULL, "cannot start a process: %s", strerror(errno));
    }
    state.process = process;
    state.pipe = ends[0];
    return 0;
}

static int lsp_run(lua_State *L) {
    char **words = push_words(L);
    fflush(stdout);
    state.run = fork();
    if (state.run == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* it saves, and ends */
        execv("/proc/self/exe", words);
        _exit(127);
    }
    if (state.run > 0) return 0;
    state.run = 0;
    vm_fail(L, NULL, "cannot start a process: %s", strerror(errno));
}

static int exit_code(int status) {
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static int lsp_running(lua_State *L) {
    int status = 0;
    pid_t ended = state.run ? waitpid(state.run, &status, WNOHANG) : -1;
    lua_pushboolean(L, ended == 0);
    if (ended <= 0) return 1;
    state.run = 0;
    lua_pushinteger(L, exit_code(status));
    return 2;
}

static int lsp_signal(lua_State *L) {
    static const char *const names[] = {"USR1", "TERM", NULL};
    int number = luaL_checkoption(L, 1, NULL, names) == 0 ? SIGUSR1 : SIGTERM;
    if (state.run) kill(state.run, number);
    return 0;
}

/* Memory that other processes open by the path until this one ends. */
static int lsp_memory(lua_State *L) {
    int file = memfd_create("mlua undo", MFD_CLOEXEC);
    if (file < 0) vm_fail(L, NULL, "cannot hold an undo in memory: %s", strerror(errno));
    lua_pushfstring(L, "/proc/%d/fd/%d", (int)getpid(), file);
    return 1;
}

/* Bytes of host memory that are available, of this machine or its container. */
static int core_host_memory(lua_State *L) {
    double bytes = 0, limit = (double)ml_cgroup_memory("");
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lf", &bytes) == 1) break;
    if (file) fclose(file);
    bytes *= 1024;
    lua_pushnumber(L, limit > 0 && limit < bytes ? limit : bytes);
    return 1;
}

static int push_end(lua_State *L) {
    int status = 0;
    lua_pushliteral(L, "process");
    lua_pushlstring(L, state.output.text ? state.output.text : "", state.output.size);
    end_process(&status);
    lua_pushinteger(L, exit_code(status));
    return 3;
}

/* A whole line of the process, as it comes. */
static bool push_line(lua_State *L) {
    buffer *b = &state.output;
    const char *end = b->size ? memchr(b->text, '\n', b->size) : NULL;
    if (!end) return false;
    size_t length = (size_t)(end - b->text);
    lua_pushliteral(L, "line");
    lua_pushlstring(L, b->text, length);
    drop(b, length + 1);
    return true;
}

/* wait(seconds, reads?) -> "message", text | "line", text | "process", rest, code | "end" | nil */
static int lsp_wait(lua_State *L) {
    enum { MILLISECONDS = 1000 };
    double until = ml_clock_now() + luaL_checknumber(L, 1);
    bool reads = lua_isnoneornil(L, 2) || lua_toboolean(L, 2);
    for (;;) {
        if (reads && push_message(L)) {
            lua_pushliteral(L, "message");
            lua_insert(L, -2);
            return 2;
        }
        if (push_line(L)) return 2;
        if (reads && state.input_ended) return lua_pushliteral(L, "end"), 1;
        if (vm_stop) return lua_pushliteral(L, "end"), 1;
        double left = until - ml_clock_now();
        struct pollfd files[2] = {{reads ? STDIN_FILENO : -1, POLLIN, 0},
                                  {state.process ? state.pipe : -1, POLLIN, 0}};
        int ready = poll(files, 2, left > 0 ? (int)(left * MILLISECONDS) + 1 : 0);
        if (ready < 0 && errno != EINTR) vm_fail(L, NULL, "cannot wait: %s", strerror(errno));
        if (ready > 0 && files[0].revents) state.input_ended = !fill(L, &state.input, STDIN_FILENO);
        if (ready > 0 && files[1].revents && !fill(L, &state.output, state.pipe))
            return push_end(L);
        if (ready <= 0 && ml_clock_now() >= until) return 0;
    }
}

/* ---- Files ----------------------------------------------------------------------------------- */

/* Seconds and size, as a text that changes when the file does; nil where there is none. */
static int lsp_stamp(lua_State *L) {
    struct stat file;
    char text[96];
    if (stat(luaL_checkstring(L, 1), &file) != 0) return 0;
    snprintf(text, sizeof text, "%lld.%09ld %lld", (long long)file.st_mtim.tv_sec,
             file.st_mtim.tv_nsec, (long long)file.st_size);
    lua_pushstring(L, text);
    return 1;
}

/* The whole path of a file or folder, or nil. */
static int lsp_path(lua_State *L) {
    char *path = realpath(luaL_checkstring(L, 1), NULL);
    if (!path) return 0;
    lua_pushstring(L, path);
    free(path);
    return 1;
}

/* The key of this machine's GPU ("h200"), or nil; of a name, whether mlua check plans for it. */
static int lsp_device(lua_State *L) {
    const char *name = luaL_optstring(L, 1, NULL);
    if (name) {
        lua_pushboolean(L, strcmp(name, "cpu") == 0 || gpu_by_key(name) != NULL);
        return 1;
    }
    const ml_gpu *gpu = gpu_of_machine();
    if (!gpu) return 0;
    lua_pushstring(L, gpu->key);
    return 1;
}

static int lsp_clock(lua_State *L) {
    lua_pushnumber(L, ml_clock_now());
    return 1;
}

void vm_lsp_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"lsp_wait", lsp_wait, "seconds: number, reads?: boolean -> string?, string?, integer?",
         "the next message of standard input, line of the process that lsp_start started, or its "
         "end: "
         "\"message\", text; \"line\", text; \"process\", rest, exit code; \"end\"; nil: none in "
         "that "
         "time"},
        {"lsp_send", lsp_send, "text: string", "a message to standard output"},
        {"lsp_start", lsp_start, "words: string[], input?: string, folder?: string",
         "run this program with these words and standard input in a folder; ends an earlier one"},
        {"lsp_stop", lsp_stop, "", "end the process"},
        {"lsp_run", lsp_run, "words: string[]",
         "run this program with these words beside this one, with its standard output"},
        {"lsp_running", lsp_running, "-> boolean, integer?",
         "whether it runs; where it has ended since, its exit code"},
        {"lsp_signal", lsp_signal, "name: string",
         "\"USR1\": save and stop at the next step; \"TERM\""},
        {"lsp_memory", lsp_memory, "-> string",
         "a file in this process's memory, which others open by that path"},
        {"host_memory", core_host_memory, "-> number", "bytes of host memory that are available"},
        {"lsp_stamp", lsp_stamp, "path: string -> string?", "changes when the file does"},
        {"lsp_path", lsp_path, "path: string -> string?", "the whole path of what exists"},
        {"lsp_device", lsp_device, "name?: string -> string|boolean?",
         "what mlua check calls this machine's GPU; of a name, whether it plans for it"},
        {"lsp_clock", lsp_clock, "-> number", "seconds of a clock that only runs forwards"},
        {0}};
    vm_register(L, functions);
}
