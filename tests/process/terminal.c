/* What only a terminal shows: the progress bar, and the prompt with editing, history and Ctrl-C. */
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "tests/process/support.h"

enum { SILENCE = 30000 /* milliseconds without output after which a terminal is given up */ };

typedef struct {
    pid_t child;
    int fd;
    ml_text output;
    size_t seen; /* what of the output was waited for already */
} terminal;

/* Run $MLUA with these words in a terminal of 80 columns. */
static terminal terminal_start(process_room *room, char *const *words) {
    terminal t = {.output.arena = room->arena};
    struct winsize size = {.ws_row = 24, .ws_col = 80};
    char binary[4096];
    REQUIRE(realpath(test_binary(), binary) != NULL);
    const char *home = room->folder;
    ml_text_add(&t.output, "%s", "");
    t.child = forkpty(&t.fd, NULL, NULL, &size);
    REQUIRE(t.child >= 0);
    if (t.child == 0) {
        setenv("TERM", "xterm", 1);
        setenv("XDG_STATE_HOME", home, 1);
        setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* libedit keeps the names of functions */
        execv(binary, words);
        _exit(127);
    }
    return t;
}

/* Read what is there; false at the end of the output, or after a long silence. */
static bool terminal_read(terminal *t) {
    char block[4096];
    struct pollfd wait = {.fd = t->fd, .events = POLLIN};
    if (poll(&wait, 1, SILENCE) <= 0) return false;
    ssize_t count = read(t->fd, block, sizeof block);
    if (count <= 0) return false;
    for (ssize_t i = 0; i < count; i++)
        if (block[i]) ml_text_add(&t->output, "%c", block[i]);
    return true;
}

/* Wait until this text comes after what was waited for before. */
static void terminal_wait(terminal *t, const char *text) {
    const char *found;
    while (!(found = strstr(t->output.text + t->seen, text)))
        if (!terminal_read(t)) {
            kill(t->child, SIGKILL);
            waitpid(t->child, NULL, 0);
            close(t->fd);
            ml_raise(ML_INTERNAL, "the terminal never shows \"%s\" after\n%s", text,
                     t->output.text);
        }
    t->seen = (size_t)(found - t->output.text) + strlen(text);
}

/* Wait for this prompt, and until keys are read one by one: before that Ctrl-D means another thing.
 */
static void terminal_prompt(terminal *t, const char *prompt) {
    struct termios mode = {0};
    terminal_wait(t, prompt);
    for (int i = 0; i < SILENCE; i++) {
        if (tcgetattr(t->fd, &mode) == 0 && !(mode.c_lflag & ICANON)) return;
        usleep(1000);
    }
    ml_raise(ML_INTERNAL, "the terminal is never in raw mode");
}

static void terminal_type(terminal *t, const char *keys) {
    REQUIRE(write(t->fd, keys, strlen(keys)) == (ssize_t)strlen(keys));
}

/* It ends by itself, with code 0. */
static void terminal_end(terminal *t) {
    int status;
    while (terminal_read(t)) {}
    close(t->fd);
    waitpid(t->child, &status, 0);
    EXPECT(status == 0, "it ends with status %#x:\n%s", status, t->output.text);
}

PROCESS_TEST(progress_bar) {
    char *words[] = {"mlua",     "run",      "--device", "cpu",    "models/gpt.lua",
                     "layers=1", "embed=32", "heads=2",  "seq=32", "batch=2",
                     "steps=6",  "sample=5", NULL};
    terminal t = terminal_start(room, words);
    terminal_wait(&t, "] step 6/6  loss ");
    terminal_wait(&t, "local function ");
    terminal_end(&t);
    CHECK(strstr(t.output.text, "\r\033[K[") != NULL); /* each bar overwrites the one before */
    CHECK(strstr(t.output.text, "#-") != NULL);
}

PROCESS_TEST(prompt_in_a_terminal) {
    char *words[] = {"mlua", "repl", "--device", "cpu", NULL};
    terminal t = terminal_start(room, words);
    terminal_prompt(&t, "[1] ");
    terminal_type(&t, "21 * 2\r");
    terminal_wait(&t, "42\r\n");
    terminal_prompt(&t, "[2] ");
    terminal_type(&t, "1 +\r"); /* continues in the next line */
    terminal_prompt(&t, "... ");
    terminal_type(&t, "6\r");
    terminal_wait(&t, "7\r\n");
    terminal_prompt(&t, "[3] ");
    terminal_type(&t, "m.softm\t"); /* completed */
    terminal_wait(&t, "ax");
    terminal_type(&t, "\003"); /* Ctrl-C gives the line up */
    terminal_prompt(&t, "[4] ");
    terminal_type(&t, "print('go') while true do end\r");
    terminal_wait(&t, "go\r\n");
    terminal_type(&t, "\003"); /* and stops what runs */
    terminal_wait(&t, "interrupted");
    terminal_prompt(&t, "[5] ");
    terminal_type(&t, "\033[A\033[A\033[A\033[A\r"); /* the first line back */
    terminal_wait(&t, "\n42\r\n");
    terminal_prompt(&t, "[6] ");
    terminal_type(&t, "\004"); /* Ctrl-D */
    terminal_end(&t);
    process_result history = process_shell(room, 0, "cat $(find . -type f)");
    process_expect(&history, "while");
}
