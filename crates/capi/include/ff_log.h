/*
 * Log of F-Stack: lines of the program, to standard error or to a stream of the program's.
 */
#ifndef FF_LOG_H
#define FF_LOG_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FF_LOG_DISABLE 0U
#define FF_LOG_EMERG 1U
#define FF_LOG_ALERT 2U
#define FF_LOG_CRIT 3U
#define FF_LOG_ERR 4U
#define FF_LOG_WARNING 5U
#define FF_LOG_NOTICE 6U
#define FF_LOG_INFO 7U
#define FF_LOG_DEBUG 8U
#define FF_LOG_MAX FF_LOG_DEBUG

#define FF_LOGTYPE_USER1 24
#define FF_LOGTYPE_USER2 25
#define FF_LOGTYPE_USER3 26
#define FF_LOGTYPE_USER4 27
#define FF_LOGTYPE_USER5 28
#define FF_LOGTYPE_USER6 29
#define FF_LOGTYPE_FSTACK_APP FF_LOGTYPE_USER1

/* Sets the stream (FILE *) of the log; NULL is standard error. */
int ff_log_reset_stream(void *f);
/* Goes back to standard error. The stream is the program's to close. */
void ff_log_close(void);
/* Sets the least severe level that is written, of all types or of one. */
void ff_log_set_global_level(uint32_t level);
int ff_log_set_level(uint32_t logtype, uint32_t level);
/* True if lines of this type and level are written; returns the stream, NULL for standard error. */
int ff_log_is_written(uint32_t level, uint32_t logtype, void **stream);

static inline int ff_vlog(uint32_t level, uint32_t logtype, const char *format, va_list arguments)
{
    void *stream = NULL;
    if (!ff_log_is_written(level, logtype, &stream))
        return 0;
    return vfprintf(stream ? (FILE *)stream : stderr, format, arguments);
}

static inline int ff_log(uint32_t level, uint32_t logtype, const char *format, ...)
{
    va_list arguments;
    int written;
    va_start(arguments, format);
    written = ff_vlog(level, logtype, format, arguments);
    va_end(arguments);
    return written;
}

#ifdef __cplusplus
}
#endif

#endif
