//! What a provider is answered, as data: the status and body that count as success, what a refused signature gets,
//! and the status after which it sends again.
//!
//! Invariant: success is 2xx, a refusal and a call for another try never are, and nothing is a redirect. Which of them
//! a delivery gets is not decided here but in `respond`.

use bytes::Bytes;
use http::{HeaderValue, StatusCode};

use crate::settings::Table;

/// Largest body of an answer, in bytes.
const BODY_MAX: usize = 64 << 10;

/// The answers that a provider understands.
#[derive(Debug, Clone)]
pub struct Ack {
    /// Success: 200 to 299.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
    /// Its content type, if there is a body.
    pub content_type: Option<HeaderValue>,
    /// What is not signed as it must be: 400 to 599.
    pub reject: StatusCode,
    /// The body of that, where the provider wants one or none; else the program's own.
    pub reject_body: Option<Bytes>,
    /// What did not commit and is to be sent again, where the provider needs one status for all of it: 400 to 599.
    pub retry: Option<StatusCode>,
}

impl Default for Ack {
    fn default() -> Self {
        Self {
            status: StatusCode::OK,
            body: Bytes::new(),
            content_type: None,
            reject: StatusCode::UNAUTHORIZED,
            reject_body: None,
            retry: None,
        }
    }
}

impl Ack {
    /// Reads the table `ack` of a scheme or a source; what it leaves out is as in `base`. `None` only after an error
    /// was reported.
    pub(crate) fn read(table: &mut Table, base: &Self) -> Option<Self> {
        const KEY: &str = "ack";
        let mut table = match table.table(KEY) {
            Some(inner) => inner,
            None if table.failed(KEY) => return None,
            None => return Some(base.clone()),
        };
        let status = status(&mut table, "status", 200..=299);
        let body = body(&mut table, "body").unwrap_or_else(|| base.body.clone());
        let content_type = content_type(&mut table, base);
        let reject = status_of_error(&mut table, "reject");
        let reject_body = body_or_base(&mut table, "reject_body", base.reject_body.as_ref());
        let retry = status_of_error(&mut table, "retry");
        let status = status.unwrap_or(base.status);
        if matches!(status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT) && !body.is_empty() {
            table.error(
                "body",
                "an answer with status 204 or 205 has no body: remove it, or give status = 200",
            );
        }
        table.finish();
        Some(Self {
            status,
            content_type: if body.is_empty() { None } else { Some(content_type?) },
            body,
            reject: reject.unwrap_or(base.reject),
            reject_body,
            retry: retry.or(base.retry),
        })
    }
}

fn status(table: &mut Table, key: &'static str, range: std::ops::RangeInclusive<u64>) -> Option<StatusCode> {
    let number = table.count(key, range)?;
    StatusCode::from_u16(u16::try_from(number).ok()?).ok()
}

/// A sender takes 2xx for success and follows 3xx, so that neither can stand for an error.
fn status_of_error(table: &mut Table, key: &'static str) -> Option<StatusCode> {
    status(table, key, 400..=599)
}

fn body(table: &mut Table, key: &'static str) -> Option<Bytes> {
    let text = table.text(key)?;
    if text.len() > BODY_MAX {
        table.error(key, format!("has {} bytes, and {BODY_MAX} are the limit", text.len()));
    }
    Some(text.into())
}

fn body_or_base(table: &mut Table, key: &'static str, base: Option<&Bytes>) -> Option<Bytes> {
    body(table, key).or_else(|| base.cloned())
}

fn content_type(table: &mut Table, base: &Ack) -> Option<HeaderValue> {
    let Some(text) = table.text("type") else {
        return base.content_type.clone().or(Some(HeaderValue::from_static("text/plain")));
    };
    let header = HeaderValue::from_str(&text).ok().filter(|_| text.contains('/'));
    if header.is_none() {
        table.error("type", format!("{text:?} is no content type: give one like \"text/plain\""));
    }
    header
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;
    use crate::provider::Scheme;

    const SCHEME: &str = "kind = \"token\"\nsig = { from = \"header:x\" }\nid = []\n";

    fn messages(ack: &str) -> String {
        let (_, problems) = read_scheme(&format!("{SCHEME}ack = {ack}"));
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn answers_are_checked_where_they_are_written() {
        assert_eq!(messages("{ status = 204, reject = 498, reject_body = \"\", retry = 429 }"), "");
        for (ack, wanted) in [
            ("{ status = 302 }", "200 to 299"),
            ("{ status = 204, body = \"x\" }", "has no body"),
            ("{ reject = 200 }", "400 to 599"),
            ("{ reject = 302 }", "400 to 599"),
            ("{ retry = 200 }", "400 to 599"),
            ("{ retry = 600 }", "400 to 599"),
            ("{ rejct = 401 }", "did you mean \"reject\"?"),
            ("{ type = \"text\" }", "no content type"),
            ("200", "expected a table"),
        ] {
            assert!(messages(ack).contains(wanted), "{ack}: {}", messages(ack));
        }
    }

    #[test]
    fn presets_answer_what_their_providers_want() {
        for (name, status, body, reject, retry) in [
            ("discord-events", 204, "", 401, None),
            ("gocardless", 204, "", 498, None),
            ("xero", 200, "", 401, None),
            ("dropbox-sign", 200, "Hello API Event Received", 401, None),
            ("adyen", 200, "[accepted]", 401, None),
            ("microsoft-graph", 202, "", 401, Some(503)),
            ("bigcommerce", 200, "", 401, None),
            ("airwallex", 200, "", 401, None),
            ("linear", 200, "", 401, None),
            ("paystack", 200, "", 401, None),
            ("brevo", 200, "", 401, Some(429)),
            ("bitbucket", 200, "", 401, Some(503)),
        ] {
            let ack = &Scheme::preset(name).unwrap().ack;
            let retry_is = ack.retry.map(|status| status.as_u16());
            let told = (ack.status.as_u16(), &ack.body[..], ack.reject.as_u16(), retry_is);
            assert_eq!(told, (status, body.as_bytes(), reject, retry), "{name}");
        }
        assert_eq!(Scheme::preset("xero").unwrap().ack.reject_body.as_deref(), Some(&b""[..]));
    }
}
