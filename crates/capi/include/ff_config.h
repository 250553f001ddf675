/*
 * Exists for programs that include it: the configuration is read by ff_init.
 */
#ifndef FF_CONFIG_H
#define FF_CONFIG_H
#endif
