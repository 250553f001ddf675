//! Applications under test and the requests that they serve.

use std::fs;
use std::path::Path;
use std::process::Command;

use tidegate_load::{ExpectedResponse, Transaction};

use crate::error::LabError;
use crate::testbed::programs;

/// Size in bytes of the message (echo), the value (redis, memcached) or the file (web servers).
const VALUE_BYTES: usize = 64;

/// Unmodified application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Application {
    /// Echo server of [`crate::testbed::apps::echo_server`].
    Echo,
    Redis,
    Memcached,
    Nginx,
    /// With the threads and processes of its default.
    Apache,
}

impl Application {
    /// Applications from Debian's packages that serve from one process.
    pub(crate) const PACKAGES: [Self; 3] = [Self::Redis, Self::Memcached, Self::Nginx];

    /// Name in rows and figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Redis => "redis",
            Self::Memcached => "memcached",
            Self::Nginx => "nginx",
            Self::Apache => "apache2",
        }
    }

    pub(crate) fn port(self) -> u16 {
        match self {
            Self::Echo => 7,
            Self::Redis => 6379,
            Self::Memcached => 11_211,
            Self::Nginx | Self::Apache => 8080,
        }
    }

    /// True if the application's executable runs and prints its version.
    pub(crate) fn is_installed(self) -> bool {
        let (executable, version_flag) = match self {
            Self::Echo => return true,
            Self::Redis => ("redis-server", "--version"),
            Self::Memcached => ("memcached", "--version"),
            Self::Nginx => ("nginx", "-v"),
            Self::Apache => ("apache2", "-v"),
        };
        Command::new(executable)
            .arg(version_flag)
            .output()
            .is_ok_and(|output| output.status.success())
    }

    /// Writes the application's files into `folder` and returns its command line: one process, one
    /// thread, nothing stored on disk.
    pub(crate) fn command_line(self, folder: &Path) -> Result<Vec<String>, LabError> {
        let root = folder.display();
        let line = match self {
            Self::Echo => {
                let executable = programs::laboratory()?;
                format!("{} noisy --echo-port {}", executable.display(), self.port())
            }
            Self::Redis => format!(
                "redis-server --port {} --bind 0.0.0.0 --protected-mode no --save  --appendonly \
                 no --logfile /dev/null --dir {root}",
                self.port()
            ),
            Self::Memcached => {
                format!("memcached -u root -p {} -U 0 -l 0.0.0.0 -t 1 -c 4096", self.port())
            }
            Self::Nginx => {
                let config = folder.join("nginx.conf");
                let text = format!(
                    "daemon off; master_process off; pid {root}/pid; error_log /dev/null;
                     events {{ worker_connections 4096; }}
                     http {{ access_log off; keepalive_requests 1000000000;
                     client_body_temp_path {root}/body; proxy_temp_path {root}/proxy;
                     fastcgi_temp_path {root}/fastcgi; uwsgi_temp_path {root}/uwsgi;
                     scgi_temp_path {root}/scgi;
                     server {{ listen {}; root {root}; }} }}",
                    self.port()
                );
                fs::write(&config, text).map_err(LabError::file(&config))?;
                write_file(folder)?;
                format!("nginx -c {} -p {root}", config.display())
            }
            Self::Apache => {
                let config = folder.join("apache.conf");
                let modules = "/usr/lib/apache2/modules";
                let text = format!(
                    "ServerRoot {root}\nServerName tidegate\nDefaultRuntimeDir {root}\n\
                     PidFile {root}/pid\nErrorLog /dev/null\nMutex file:{root}\n\
                     LoadModule mpm_event_module {modules}/mod_mpm_event.so\n\
                     LoadModule authz_core_module {modules}/mod_authz_core.so\n\
                     User www-data\nGroup www-data\nListen 0.0.0.0:{}\nDocumentRoot {root}\n\
                     <Directory {root}>\nRequire all granted\n</Directory>\n",
                    self.port()
                );
                fs::write(&config, text).map_err(LabError::file(&config))?;
                write_file(folder)?;
                format!("apache2 -DFOREGROUND -f {}", config.display())
            }
        };
        // Two consecutive spaces produce an empty argument.
        Ok(line.split(' ').map(str::to_owned).collect())
    }

    /// Request sent once before the measurement: it stores the value that the load reads.
    pub(crate) fn setup_request(self) -> Option<Transaction> {
        let value = "x".repeat(VALUE_BYTES);
        let (request, answer) = match self {
            Self::Redis => {
                (format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${VALUE_BYTES}\r\n{value}\r\n"), "+OK\r\n")
            }
            Self::Memcached => (format!("set k 0 0 {VALUE_BYTES}\r\n{value}\r\n"), "STORED\r\n"),
            Self::Echo | Self::Nginx | Self::Apache => return None,
        };
        Some(Transaction {
            request: request.into_bytes(),
            response: ExpectedResponse::Exactly(answer.into()),
        })
    }

    /// Request that the load repeats, and its expected response.
    pub(crate) fn measured_request(self) -> Transaction {
        let value = "x".repeat(VALUE_BYTES);
        match self {
            Self::Echo => Transaction {
                request: value.clone().into_bytes(),
                response: ExpectedResponse::Exactly(value.into_bytes()),
            },
            Self::Redis => Transaction {
                request: b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n".to_vec(),
                response: ExpectedResponse::Exactly(
                    format!("${VALUE_BYTES}\r\n{value}\r\n").into_bytes(),
                ),
            },
            Self::Memcached => Transaction {
                request: b"get k\r\n".to_vec(),
                response: ExpectedResponse::Exactly(
                    format!("VALUE k 0 {VALUE_BYTES}\r\n{value}\r\nEND\r\n").into_bytes(),
                ),
            },
            Self::Nginx | Self::Apache => Transaction {
                request: b"GET /f HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
                // The response header contains the time, so only the length is checked.
                response: ExpectedResponse::Length(0),
            },
        }
    }
}

/// Writes the file that the measured request of a web server asks for.
fn write_file(folder: &Path) -> Result<(), LabError> {
    let file = folder.join("f");
    fs::write(&file, [b'x'; VALUE_BYTES]).map_err(LabError::file(&file))
}
