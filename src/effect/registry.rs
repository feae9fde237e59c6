//! The effects of a program, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Effect;
use crate::config::{self, Config};

/// The Rust effects that a program has, by the names that settings call them by: `effect = "rust:NAME"`. The `hapax`
/// program itself has none.
#[derive(Clone, Default)]
pub struct Effects {
    known: BTreeMap<String, Arc<dyn Effect>>,
    /// Registered again after the first time.
    twice: BTreeSet<String>,
}

impl std::fmt::Debug for Effects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.known.keys()).finish()
    }
}

/// Settings that name what is not registered, or effects of which nobody knows which one is meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnknownEffects(String);

impl Effects {
    /// With this effect too, under a name of a-z, 0-9, _ and -.
    #[must_use]
    pub fn with(mut self, name: &str, effect: impl Effect + 'static) -> Self {
        if self.known.insert(name.to_owned(), Arc::new(effect)).is_some() {
            self.twice.insert(name.to_owned());
        }
        self
    }

    /// Whether every effect that the sources name is here. Returns the names that no source names.
    ///
    /// # Errors
    /// All that are missing, with what is here; or a name that was registered twice.
    pub fn check(&self, config: &Config) -> Result<Vec<&str>, UnknownEffects> {
        if let Some(name) = self.twice.first() {
            return Err(UnknownEffects(format!(
                "effect {name:?} is registered twice: give each a name of its own"
            )));
        }
        let mut named = BTreeSet::new();
        let mut missing = Vec::new();
        for source in config.sources.values() {
            let config::Effect::Rust { name, .. } = &source.effect else { continue };
            named.insert(name.as_str());
            if !self.known.contains_key(name) {
                missing.push(format!("source {}: effect \"rust:{name}\" is not registered", source.name));
            }
        }
        if !missing.is_empty() {
            return Err(UnknownEffects(format!("{}; {}", missing.join("; "), self.told())));
        }
        Ok(self.known.keys().map(String::as_str).filter(|name| !named.contains(name)).collect())
    }

    /// What there is, for whoever sought something else.
    fn told(&self) -> String {
        if self.known.is_empty() {
            return "this program has no Rust effects: they are part of a program of your own, which registers them \
                    and starts the gateway from the library (see \"An effect in Rust\" in the README)"
                .to_owned();
        }
        let names: Vec<String> = self.known.keys().map(|name| format!("\"rust:{name}\"")).collect();
        format!("registered are {}", names.join(", "))
    }

    pub(crate) fn get(&self, name: &str) -> Result<Arc<dyn Effect>, UnknownEffects> {
        let missing = || UnknownEffects(format!("effect \"rust:{name}\" is not registered; {}", self.told()));
        self.known.get(name).cloned().ok_or_else(missing)
    }
}
