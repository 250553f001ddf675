//! Settings of F-Stack's log. The header `ff_log.h` writes the lines.

use std::sync::Mutex;

use libc::{c_int, c_void};

use crate::boundary::export;
use crate::socket::{lock, os_error};

/// Number of log types.
const TYPES: usize = 32;
/// Level of all types at first (`FF_LOG_INFO`).
const DEFAULT_LEVEL: u32 = 7;
/// Highest level (`FF_LOG_DEBUG`).
const MAX_LEVEL: u32 = 8;

struct LogSettings {
    /// Stream of the program, as an address; 0 is standard error.
    stream: usize,
    global_level: u32,
    levels: [u32; TYPES],
}

static SETTINGS: Mutex<LogSettings> =
    Mutex::new(LogSettings { stream: 0, global_level: MAX_LEVEL, levels: [DEFAULT_LEVEL; TYPES] });

export! {
    /// Sets the stream of the log.
    ff_log_reset_stream(f: *mut c_void) -> c_int = status {
        lock(&SETTINGS).stream = f as usize;
        Ok(())
    }
    /// Goes back to standard error.
    ff_log_close() = nothing {
        lock(&SETTINGS).stream = 0;
        Ok(())
    }
    /// Sets the level of all types.
    ff_log_set_global_level(level: u32) = nothing {
        lock(&SETTINGS).global_level = level;
        Ok(())
    }
    /// Sets the level of a type.
    ff_log_set_level(logtype: u32, level: u32) -> c_int = status {
        let mut settings = lock(&SETTINGS);
        let place = settings.levels.get_mut(logtype as usize);
        *place.ok_or_else(|| os_error(libc::EINVAL))? = level;
        Ok(())
    }
    /// True if lines of a type and level are written.
    ff_log_is_written(level: u32, logtype: u32, stream: *mut *mut c_void) -> c_int = number {
        let settings = lock(&SETTINGS);
        let of_type = settings.levels.get(logtype as usize).copied().unwrap_or(DEFAULT_LEVEL);
        if let Some(stream) = stream.as_mut() {
            *stream = settings.stream as *mut c_void;
        }
        Ok((level > 0 && level <= of_type.min(settings.global_level)).into())
    }
}
