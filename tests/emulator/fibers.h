/* What the emulator's libraries share. Device memory is host memory; work is done on the calling
 * thread (streams.c). */
#ifndef EMULATOR_FIBERS_H
#define EMULATOR_FIBERS_H

typedef struct {
    unsigned x, y, z;
} emu_index;

/* Run a kernel's entry over a grid; 0, or 1 where its threads wait for one another for ever. */
int fibers_run(void (*entry)(void *), void *arguments, emu_index grid, emu_index block,
               unsigned shared_bytes);
/* The same where blocks wait for one another: all have their threads and shared memory at once. */
int fibers_run_together(void (*entry)(void *), void *arguments, emu_index grid, emu_index block,
                        unsigned shared_bytes);
/* Put work on a stream, or into the graph that is being captured. It is done when the call gives 1;
 * one that waits for another process gives 0 and is called again. Takes the data over. */
void emu_enqueue(void *stream, int (*call)(void *), void *data);
/* Let `later` come after all that is on `earlier` by now. */
void emu_order(void *earlier, void *later);
void emu_finish(void); /* all streams */
/* Whether what makes ready for more (loads of kernels at their first launch, graphs, connections)
 * waits for all that is under way, as a GPU's driver may do: EMULATOR_WAITS=1. */
int emu_waits(void);
/* A line for the file EMULATOR_LAUNCHES: "capture", "kernel NAME", or "early NAME" of a launch that
 * need not wait for the one ahead. */
void emu_note(const char *what, const char *name);
void emu_complain(const char *what); /* counted: the process then ends with an error */
/* Whether the device's context is there and the process has not begun to end. A thread of a library
 * that finds neither touches what was freed, as in a driver: the process dies of SIGSEGV. */
int emu_alive(void);
void emu_enter(void); /* a thread is inside a call that needs both */
void emu_leave(void);

#endif
