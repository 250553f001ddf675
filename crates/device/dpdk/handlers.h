// DPDK's handler thread, which runs the drivers' handlers: of interrupts, of messages on their
// sockets, of timers.
//
// Some drivers do not expect to be used or closed while their handlers run. These functions
// keep the two apart.

#ifndef TIDEGATE_HANDLERS_H
#define TIDEGATE_HANDLERS_H

#include <stdint.h>

// Must be called once, before the other functions. Returns 0 or an error number.
int dpdk_handlers_start(void);

// Runs `work` on the handler thread and waits for it. No handler runs meanwhile, and the driver
// can unregister its handlers.
void dpdk_among_handlers(void (*work)(void *argument), void *argument);

// Handlers run only while no thread excludes them, until dpdk_unwatch_handlers for this port.
void dpdk_watch_handlers(uint16_t port);
// Must be called on the handler thread.
void dpdk_unwatch_handlers(uint16_t port);

// Number with which a thread announces its bursts. Returns 0 or an error number.
int dpdk_take_slot(unsigned *slot);
void dpdk_return_slot(unsigned slot);

// Announces a burst and excludes handlers until dpdk_let_handlers_in. Returns 0 and does nothing
// while a handler may run.
int dpdk_keep_handlers_out(unsigned slot);
// Waits until no handler runs, then excludes handlers until dpdk_let_handlers_in.
void dpdk_await_handlers(unsigned slot);
void dpdk_let_handlers_in(unsigned slot);

// Waits until all threads with these slots see what this thread has written, and are in no burst
// that began before.
void dpdk_await_bursts(const unsigned *slots, unsigned count);

#endif
