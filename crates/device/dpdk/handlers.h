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

// Until dpdk_unwatch_handlers, handlers run only while no thread excludes them for this port.
void dpdk_watch_handlers(uint16_t port);
// Must be called on the handler thread.
void dpdk_unwatch_handlers(uint16_t port);

// Excludes handlers for a watched port until dpdk_let_handlers_in. Returns 0 and does nothing
// while a handler may run. At most one thread at a time may do so for a port.
int dpdk_keep_handlers_out(uint16_t port);
// Waits until no handler runs, then excludes handlers until dpdk_let_handlers_in.
void dpdk_await_handlers(uint16_t port);
void dpdk_let_handlers_in(uint16_t port);

#endif
