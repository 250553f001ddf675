/*
 * Epoll of F-Stack on the Tidegate stack. ff_epoll_wait never waits, whatever the timeout is: ff_run
 * does.
 */
#ifndef FF_EPOLL_H
#define FF_EPOLL_H

#include <sys/epoll.h>

#ifdef __cplusplus
extern "C" {
#endif

int ff_epoll_create(int size);
int ff_epoll_ctl(int epfd, int op, int fd, struct epoll_event *event);
int ff_epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout);

#ifdef __cplusplus
}
#endif

#endif
