// DPDK's thread that calls the drivers' handlers: of interrupts, of messages on
// their sockets, of timers.
//
// Some drivers do not expect to be used or closed while their handlers run. Both
// are kept apart here.

#ifndef TIDEGATE_HANDLERS_H
#define TIDEGATE_HANDLERS_H

#include <stdint.h>

// Has `work` done on the thread of the handlers, and waits for it: no handler
// runs meanwhile, and the driver can take its own back.
void tg_among_handlers(void (*work)(void *argument), void *argument);

// From here to tg_unwatch_handlers handlers run only while nobody keeps them
// out, because of this port.
void tg_watch_handlers(uint16_t port);
// To be called on the thread of the handlers.
void tg_unwatch_handlers(uint16_t port);

// Keeps handlers out for a port that is watched, until tg_let_handlers_in.
// Returns 0, and does nothing, while one may run. Of one port only one thread may
// do so at a time.
int tg_keep_handlers_out(uint16_t port);
// Waits until none runs, and keeps them out until tg_let_handlers_in.
void tg_await_handlers(uint16_t port);
void tg_let_handlers_in(uint16_t port);

#endif
