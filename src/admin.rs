//! The listener for operators: `/live`, `/ready`, `/metrics`. Nothing here can hold up the path of a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;

use crate::generation::Heartbeat;
use crate::metrics::Metrics;
use crate::server::Service;
use crate::tasks::Tasks;

/// What an operator may ask.
#[derive(Debug, Clone)]
pub struct Admin {
    /// Fresh while Postgres answers.
    pub heartbeat: Arc<Heartbeat>,
    /// Whether the schema and the effects were found to be right.
    pub schema_ready: Arc<AtomicBool>,
    /// Whether the process is about to stop.
    pub draining: Arc<AtomicBool>,
    /// For `/metrics`.
    pub metrics: Arc<Metrics>,
    /// Whether the background loops live.
    pub tasks: Tasks,
}

impl Admin {
    /// Why the gateway should get no traffic. Of the stores Postgres only: without Redis the gateway works.
    fn unready(&self) -> Option<String> {
        let now = Instant::now();
        if self.draining.load(Ordering::Relaxed) {
            Some("draining".to_owned())
        } else if !self.schema_ready.load(Ordering::Relaxed) {
            Some("the database is not ready; the log says why".to_owned())
        } else if self.heartbeat.current(now).is_none() {
            Some("postgres does not answer".to_owned())
        } else {
            let failing = self.tasks.failing(now);
            let each = failing.iter().map(|(name, times)| format!("{name} failed {times} times in a row"));
            let each: Vec<String> = each.collect();
            (!each.is_empty()).then(|| format!("background loops: {}; the log says why", each.join(", ")))
        }
    }

    fn metrics(&self) -> Result<String, std::fmt::Error> {
        let now = Instant::now();
        self.metrics.render(self.heartbeat.age(now), &self.tasks.loops(now))
    }

    fn respond(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        if method != Method::GET && method != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "GET only\n");
        }
        match path {
            "/live" => text(StatusCode::OK, "live\n"),
            "/ready" => match self.unready() {
                None => text(StatusCode::OK, "ready\n"),
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, &format!("{why}\n")),
            },
            "/metrics" => match self.metrics() {
                Ok(metrics) => {
                    let mut response = text(StatusCode::OK, &metrics);
                    let open_metrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(open_metrics));
                    response
                }
                Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "metrics cannot be written\n"),
            },
            _ => text(StatusCode::NOT_FOUND, "here are /live, /ready and /metrics\n"),
        }
    }
}

impl Service for Admin {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        self.respond(request.method(), request.uri().path())
    }
}

fn text(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::copy_from_slice(text.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
