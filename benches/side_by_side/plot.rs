//! The rates as bars, one group per workload; the thin line is the spread over the rounds.

use std::fmt::Write as _;

use super::measure::Run;
use super::numbers::Spread;
use super::plan::{Case, Server};

const WIDTH: f64 = 900.0;
const LABELS: f64 = 150.0;
const VALUES: f64 = 90.0;
const LINE: f64 = 20.0;

pub(crate) fn svg(cases: &[Case], runs: &[Run]) -> String {
    let mut drawing = Drawing { text: String::new(), y: LINE };
    for case in cases {
        let workload = &case.workload;
        let title = format!("{}: requests per second, {} connections", workload.name, workload.connections);
        drawing.title(&title);
        let rate = |server: &Server| {
            let runs = runs.iter().filter(|run| run.server == *server && run.workload == workload.name);
            Spread::of(runs.map(|run| run.requests_per_second)).map(|rate| (*server, rate))
        };
        let rates: Vec<_> = case.servers.iter().filter_map(rate).collect();
        let most = rates.iter().map(|(_, rate)| rate.max).fold(1.0, f64::max);
        for (server, rate) in rates {
            drawing.bar(server, rate, most);
        }
        drawing.y += LINE;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
        drawing.y, drawing.text
    )
}

struct Drawing {
    text: String,
    y: f64,
}

impl Drawing {
    fn title(&mut self, title: &str) {
        self.add(&format!("<text x=\"10\" y=\"{}\" font-weight=\"bold\">{title}</text>", self.y));
        self.y += LINE;
    }

    fn bar(&mut self, server: Server, rate: Spread, most: f64) {
        let x = |value: f64| LABELS + (WIDTH - LABELS - VALUES) * value / most;
        let middle = self.y - 4.0;
        let end = x(rate.median);
        self.add(&format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LABELS - 8.0,
            self.y,
            server.name()
        ));
        self.add(&format!(
            "<rect x=\"{LABELS}\" y=\"{}\" width=\"{:.1}\" height=\"14\" fill=\"{}\"/>",
            self.y - 11.0,
            end - LABELS,
            colour(server)
        ));
        self.add(&format!(
            "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"black\"/>",
            x(rate.min),
            x(rate.max)
        ));
        self.add(&format!("<text x=\"{:.1}\" y=\"{}\">{:.0}</text>", x(rate.max) + 6.0, self.y, rate.median));
        self.y += LINE;
    }

    fn add(&mut self, element: &str) {
        // Writing to a string cannot fail.
        writeln!(self.text, "{element}").unwrap_or_default();
    }
}

const fn colour(server: Server) -> &'static str {
    match server {
        Server::Hyper | Server::HyperHmac | Server::HyperHmacId | Server::PgBatch => "#b8b8b8",
        Server::NaivePlain | Server::NaivePlainRedis | Server::Naive | Server::NaiveRedis => "#e0a458",
        Server::HapaxRedis | Server::HapaxMemory | Server::HapaxOff | Server::HapaxLogAll => "#3a7ca5",
    }
}
