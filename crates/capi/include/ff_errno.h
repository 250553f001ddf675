/*
 * Exists for programs that include it: errors are those of errno.h.
 */
#ifndef FF_ERRNO_H
#define FF_ERRNO_H

#include <errno.h>

#endif
