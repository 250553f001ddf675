//! The programs that are served, and what they are asked.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::error::LabError;
use crate::load::{Answer, Question};

/// Bytes of a value or of a file.
const VALUE_BYTES: usize = 64;

/// A program as Debian has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    Redis,
    Memcached,
    Nginx,
}

impl Program {
    pub(super) const ALL: [Self; 3] = [Self::Redis, Self::Memcached, Self::Nginx];

    /// The name in rows and figures.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memcached => "memcached",
            Self::Nginx => "nginx",
        }
    }

    pub(super) fn port(self) -> u16 {
        match self {
            Self::Redis => 6379,
            Self::Memcached => 11_211,
            Self::Nginx => 8080,
        }
    }

    /// Whether it is there.
    pub(super) fn is_installed(self) -> bool {
        let (program, ask) = match self {
            Self::Redis => ("redis-server", "--version"),
            Self::Memcached => ("memcached", "--version"),
            Self::Nginx => ("nginx", "-v"),
        };
        Command::new(program).arg(ask).output().is_ok_and(|asked| asked.status.success())
    }

    /// Writes what it needs into a folder, and gives its command line: one process,
    /// one thread, nothing on disk.
    pub(super) fn command_line(self, folder: &Path) -> Result<Vec<String>, LabError> {
        let root = folder.display();
        let line = match self {
            Self::Redis => format!(
                "redis-server --port {} --bind 0.0.0.0 --protected-mode no --save  --appendonly \
                 no --logfile /dev/null --dir {root}",
                self.port()
            ),
            Self::Memcached => {
                format!("memcached -u root -p {} -U 0 -l 0.0.0.0 -t 1", self.port())
            }
            Self::Nginx => {
                let config = folder.join("nginx.conf");
                let text = format!(
                    "daemon off; master_process off; pid {root}/pid; error_log /dev/null;
                     events {{ worker_connections 1024; }}
                     http {{ access_log off; keepalive_requests 1000000000;
                     client_body_temp_path {root}/body; proxy_temp_path {root}/proxy;
                     fastcgi_temp_path {root}/fastcgi; uwsgi_temp_path {root}/uwsgi;
                     scgi_temp_path {root}/scgi;
                     server {{ listen {}; root {root}; }} }}",
                    self.port()
                );
                fs::write(&config, text).map_err(LabError::file(&config))?;
                let file = folder.join("f");
                fs::write(&file, vec![b'x'; VALUE_BYTES]).map_err(LabError::file(&file))?;
                format!("nginx -c {} -p {root}", config.display())
            }
        };
        // Two blanks are an empty argument.
        Ok(line.split(' ').map(str::to_owned).collect())
    }

    /// What is asked before everything else: the value that will be read.
    pub(super) fn preparation(self) -> Option<Question> {
        let value = "x".repeat(VALUE_BYTES);
        let (request, answer) = match self {
            Self::Redis => {
                (format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${VALUE_BYTES}\r\n{value}\r\n"), "+OK\r\n")
            }
            Self::Memcached => (format!("set k 0 0 {VALUE_BYTES}\r\n{value}\r\n"), "STORED\r\n"),
            Self::Nginx => return None,
        };
        Some(Question { request: request.into_bytes(), answer: Answer::Exactly(answer.into()) })
    }

    /// What is asked again and again.
    pub(super) fn question(self) -> Question {
        let value = "x".repeat(VALUE_BYTES);
        match self {
            Self::Redis => Question {
                request: b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n".to_vec(),
                answer: Answer::Exactly(format!("${VALUE_BYTES}\r\n{value}\r\n").into_bytes()),
            },
            Self::Memcached => Question {
                request: b"get k\r\n".to_vec(),
                answer: Answer::Exactly(
                    format!("VALUE k 0 {VALUE_BYTES}\r\n{value}\r\nEND\r\n").into_bytes(),
                ),
            },
            Self::Nginx => Question {
                request: b"GET /f HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
                // The head has the time in it: what counts is the length.
                answer: Answer::Bytes(0),
            },
        }
    }
}
