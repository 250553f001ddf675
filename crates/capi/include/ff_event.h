/*
 * Events of F-Stack's kqueues: the values of FreeBSD.
 */
#ifndef FF_EVENT_H
#define FF_EVENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EVFILT_READ (-1)
#define EVFILT_WRITE (-2)

/* Actions. */
#define EV_ADD 0x0001
#define EV_DELETE 0x0002
#define EV_ENABLE 0x0004
#define EV_DISABLE 0x0008

/* Flags. */
#define EV_ONESHOT 0x0010
#define EV_CLEAR 0x0020
#define EV_RECEIPT 0x0040
#define EV_DISPATCH 0x0080

/* Returned flags. */
#define EV_ERROR 0x4000
#define EV_EOF 0x8000

struct kevent {
    uintptr_t ident;
    short filter;
    unsigned short flags;
    unsigned int fflags;
    int64_t data;
    void *udata;
    uint64_t ext[4];
};

static inline void ff_set_kevent(struct kevent *event, uintptr_t ident, short filter,
                                 unsigned short flags, unsigned int fflags, int64_t data,
                                 void *udata)
{
    event->ident = ident;
    event->filter = filter;
    event->flags = flags;
    event->fflags = fflags;
    event->data = data;
    event->udata = udata;
    event->ext[0] = event->ext[1] = event->ext[2] = event->ext[3] = 0;
}

#define EV_SET(event, ident, filter, flags, fflags, data, udata)                                 \
    ff_set_kevent((event), (uintptr_t)(ident), (short)(filter), (unsigned short)(flags),        \
                  (unsigned int)(fflags), (int64_t)(data), (udata))

#ifdef __cplusplus
}
#endif

#endif
