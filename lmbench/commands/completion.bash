# Completes lmbench's command line in bash. Offers file names where lmbench has no words, or the word is quoted.
_lmbench() {
    local words
    COMPREPLY=()
    [[ ${COMP_WORDS[COMP_CWORD]} == *[\\\'\"\$\`]* ]] && return
    mapfile -t words < <("$1" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    # Quoted, since the shell would run what a folder's name says.
    (( ${#words[@]} )) && mapfile -t COMPREPLY < <(printf '%q\n' "${words[@]}")
}
complete -o default -F _lmbench lmbench
