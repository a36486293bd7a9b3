/* What the emulator's libraries share. Device memory is host memory and a launch runs at once,
 * on the calling thread; while a stream is captured, launches are only recorded. */
#ifndef EMULATOR_FIBERS_H
#define EMULATOR_FIBERS_H

typedef struct {
    unsigned x, y, z;
} emu_index;

/* Run a kernel's entry over a grid; 0, or 1 where its threads wait for one another for ever. */
int fibers_run(void (*entry)(void *), void *arguments, emu_index grid, emu_index block,
               unsigned shared_bytes);
/* Do this now, or at each launch of the graph that is being captured. Takes the data over. */
void emu_enqueue(void (*call)(void *), void *data);
void emu_complain(const char *what); /* counted: the process then ends with an error */

#endif
